"""The estimate for sharded and split training is what torch allocates on a rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.support.gpt import TinyGPT, make_tokens
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accelerate import ParallelismConfig
from accelerate.commands.estimate import estimate_command, estimate_command_parser
from accelerate.offload.estimate import ModelTensors, per_rank, tensors_of_model
from accelerate.utils import FullyShardedDataParallelPlugin

pytestmark = pytest.mark.multiprocess


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.nbytes


def train_one_step() -> tuple[int, int, int]:
    """Return the bytes of weights with buffers, gradients and moments that this rank holds after a step."""
    dist.init_process_group("gloo")
    try:
        model = network()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return (
            sum(local_bytes(tensor) for tensor in [*model.parameters(), *model.buffers()]),
            sum(local_bytes(parameter.grad) for parameter in model.parameters() if parameter.grad is not None),
            sum(local_bytes(moment) for moment in moments),
        )
    finally:
        dist.destroy_process_group()


def test_fsdp_holds_what_the_estimate_says() -> None:
    expected = per_rank(ModelTensors(tuple(tensors_of_model(network()))), "float32", 2)["FSDP"]
    first, second = run_group(train_one_step, 2)
    assert first == (expected.weights, expected.gradients, expected.optimizer)
    assert second < first


LAYOUTS = {"tp": (1, 4), "fsdp and tp": (2, 2), "fsdp": (4, 1)}


def resident(fsdp: int, tp: int) -> int:
    """Return the bytes of weights, gradients and moments that this rank holds after a step in a layout."""
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if fsdp > 1 else {}
    sizes = ParallelismConfig(dp_shard_size=fsdp, tp_size=tp)
    accelerator = fresh_accelerator(parallelism_config=sizes, **options)
    model = TinyGPT(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), foreach=False))
    tokens = make_tokens(2)
    accelerator.backward(model(tokens[:, :-1], tokens[:, 1:]))
    optimizer.step()
    held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    held += [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return sum(local_bytes(tensor) for tensor in held)


def every_layout() -> dict[str, int]:
    return {name: resident(*sizes) for name, sizes in LAYOUTS.items()}


def test_a_layout_holds_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(TinyGPT(torch.float32).state_dict(), tmp_path / "model.safetensors")
    ranks = run_group(every_layout, 4)
    for name, (fsdp, tp) in LAYOUTS.items():
        words = [str(tmp_path), "--dtypes", "float32", "--json", "--fsdp", str(fsdp), "--tp", str(tp)]
        estimate_command(estimate_command_parser().parse_args(words))
        found = json.loads(capsys.readouterr().out)
        assert found["num_processes"] == 4
        (said,) = found["per_rank"]["float32"].values()
        assert max(rank[name] for rank in ranks) == pytest.approx(said["total"] - said["working"], rel=0.1)
