"""Sharded models and their optimizers, saved and loaded by two processes in every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_group
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType

from accelerate._base.errors import CheckpointError
from accelerate.strategies.fsdp.public import (
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)

LAYOUTS = [
    ("FULL_STATE_DICT", True),
    ("SHARDED_STATE_DICT", True),
    ("SHARDED_STATE_DICT", False),
    ("LOCAL_STATE_DICT", True),
]
WHOLE = StateDictOptions(full_state_dict=True)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3), nn.LayerNorm(3))


def shard_fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def shard_fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


SHARDERS: dict[str, Callable[[nn.Module], nn.Module]] = {"fsdp2": shard_fsdp2, "fsdp1": shard_fsdp1}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed + dist.get_rank())
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    weights = get_model_state_dict(model, options=WHOLE)
    return copy.deepcopy((weights, get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]))


def save_and_load(folder: str, sharder: str) -> dict[str, Any]:
    """Train two steps, save, and load into a fresh model, once for every layout; return what was seen."""
    dist.init_process_group("gloo")
    accelerator = SimpleNamespace(wait_for_everyone=dist.barrier)
    seen: dict[str, Any] = {}
    for kind, use_dcp in LAYOUTS:
        plugin, target = (
            SimpleNamespace(state_dict_type=StateDictType[kind]),
            Path(folder, sharder, f"{kind}_{use_dcp}"),
        )
        model = SHARDERS[sharder](make_model(seed=1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for number in range(2):
            step(model, optimizer, seed=number)
        save_fsdp_model(plugin, accelerator, model, target, use_dcp=use_dcp)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, target, use_dcp=use_dcp)
        wanted = whole_state(model, optimizer)

        fresh = SHARDERS[sharder](make_model(seed=2))
        fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=0.1)
        before = whole_state(fresh, fresh_optimizer)
        result = load_fsdp_model(plugin, accelerator, fresh, target, use_dcp=use_dcp)
        load_fsdp_optimizer(plugin, accelerator, fresh_optimizer, fresh, target, use_dcp=use_dcp)
        loaded = whole_state(fresh, fresh_optimizer)
        step(model, optimizer, seed=9)
        step(fresh, fresh_optimizer, seed=9)
        after, also_after = whole_state(model, optimizer), whole_state(fresh, fresh_optimizer)
        seen[f"{kind} {use_dcp}"] = {
            "differed before": not equal(before[0], wanted[0]),
            "weights": equal(loaded[0], wanted[0]),
            "moments": equal(loaded[1], wanted[1]) and len(loaded[1]) == 6,
            "next step": equal(after[0], also_after[0]),
            "no key is wrong": (list(result.missing_keys), list(result.unexpected_keys)) == ([], []),
            "files": sorted(str(path.relative_to(target)) for path in target.iterdir()),
        }
        if kind == "FULL_STATE_DICT":
            first, *others = fresh.parameters()
            other = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.1)
            with pytest.raises(CheckpointError, match=r"with \[6\] parameters in its groups.* has \[1, 5\]"):
                load_fsdp_optimizer(plugin, accelerator, other, fresh, target, use_dcp=use_dcp)
    dist.barrier()
    dist.destroy_process_group()
    return seen


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    return torch.equal(torch.as_tensor(first), torch.as_tensor(second))


FILES = {
    "FULL_STATE_DICT True": ["optimizer.bin", "pytorch_model_fsdp.bin"],
    "SHARDED_STATE_DICT True": ["optimizer_0", "pytorch_model_fsdp_0"],
    "SHARDED_STATE_DICT False": [
        "optimizer_0_rank0.bin",
        "optimizer_0_rank1.bin",
        "pytorch_model_fsdp_0_rank0.bin",
        "pytorch_model_fsdp_0_rank1.bin",
    ],
    "LOCAL_STATE_DICT True": [
        "optimizer_0",
        "pytorch_model_fsdp_rank0.bin",
        "pytorch_model_fsdp_rank1.bin",
    ],
}


@pytest.mark.multiprocess
# torch's own FSDP1 uses what torch has deprecated (2.13).
@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup:UserWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning")
@pytest.mark.parametrize("sharder", SHARDERS)
def test_what_is_saved_comes_back_equal_and_trains_on_alike(sharder: str, tmp_path: Path) -> None:
    for seen in run_group(save_and_load, 2, str(tmp_path), sharder):
        assert seen.keys() == FILES.keys()
        for layout, facts in seen.items():
            assert facts.pop("files") == FILES[layout], layout
            assert facts == dict.fromkeys(facts, True), layout
    weights = torch.load(tmp_path / sharder / "FULL_STATE_DICT_True" / "pytorch_model_fsdp.bin", weights_only=True)
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        name: tuple(value.shape) for name, value in make_model(0).state_dict().items()
    }


def save_then_read_alone(folder: str) -> None:
    dist.init_process_group("gloo")
    accelerator = SimpleNamespace(wait_for_everyone=dist.barrier)
    plugin = SimpleNamespace(state_dict_type="SHARDED_STATE_DICT")
    save_fsdp_model(plugin, accelerator, shard_fsdp2(make_model(seed=5)), folder)
    dist.destroy_process_group()


def read(folder: str, kind: str, use_dcp: bool) -> dict[str, torch.Tensor] | str:
    dist.init_process_group("gloo")
    model = shard_fsdp2(make_model(seed=6))
    try:
        load_fsdp_model(
            SimpleNamespace(state_dict_type=kind),
            SimpleNamespace(wait_for_everyone=dist.barrier),
            model,
            folder,
            use_dcp=use_dcp,
        )
        return dict(get_model_state_dict(model, options=WHOLE))
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.multiprocess
def test_a_sharded_folder_is_read_by_another_number_of_processes(tmp_path: Path) -> None:
    run_group(save_then_read_alone, 2, str(tmp_path))
    (loaded,) = run_group(read, 1, str(tmp_path), "SHARDED_STATE_DICT", True)
    assert isinstance(loaded, dict)
    assert equal(loaded, dict(make_model(seed=5).state_dict()))


@pytest.mark.multiprocess
def test_a_missing_file_and_an_unknown_type_say_what_to_write(tmp_path: Path) -> None:
    (missing,) = run_group(read, 1, str(tmp_path), "FULL_STATE_DICT", True)
    assert "pytorch_model_fsdp.bin" in missing
    assert "state_dict_type" in missing
    (unknown,) = run_group(read, 1, str(tmp_path), "HALF_STATE_DICT", True)
    assert "'HALF_STATE_DICT'" in unknown
    assert "'FULL_STATE_DICT'" in unknown
