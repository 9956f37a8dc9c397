"""The steps of sharding that programs call by themselves, on one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.training import fresh_accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate.strategies.fsdp.base import ignored_modules
from accelerate.strategies.fsdp.public import load_fsdp_model, save_fsdp_model
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    ensure_weights_retied,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
)
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.middle(self.first(inputs)))
        return out


def test_ties_survive_a_function_that_gives_memory() -> None:
    model = Tied().to("meta")
    model.last.weight = model.first.weight
    initialise = ensure_weights_retied(
        lambda module: module.to_empty(device="cpu", recurse=False), model, torch.device("cpu")
    )
    for module in (model.first, model.middle, model.last):
        initialise(module)
    assert model.last.weight is model.first.weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert len(list(model.parameters())) == 5


def test_a_policy_selects_modules_and_keeps_ties() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=lambda module: isinstance(module, nn.Linear)
    )
    model = Tied()
    policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
    assert policy is not None
    assert [name for name, module in model.named_modules() if policy(module)] == ["middle"]
    assert fsdp2_prepare_auto_wrap_policy(FullyShardedDataParallelPlugin(fsdp_version=2), model) is None


def test_activations_are_computed_again_with_the_same_gradients() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=lambda module: isinstance(module, nn.Linear)
    )
    model = Tied()
    inputs = torch.ones(2, 3)
    model(inputs).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    keys = list(model.state_dict())
    model.zero_grad()
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    assert fsdp2_apply_ac(accelerator, model) is model
    assert type(model.middle).__name__ == "CheckpointWrapper"
    assert list(model.state_dict()) == keys
    fsdp2_apply_ac(accelerator, model)  # a second time changes nothing
    model(inputs).sum().backward()
    found = fsdp2_canonicalize_names(dict(model.named_parameters()))
    assert found.keys() == expected.keys()
    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in found.items())


def test_an_optimizer_is_pointed_to_other_parameters() -> None:
    old, new = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    pairs = zip(old.parameters(), new.parameters(), strict=True)
    mapping = {left.data_ptr(): right for left, right in pairs}
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert all(left is right for left, right in zip(optimizer.param_groups[0]["params"], new.parameters(), strict=True))
    with pytest.raises(KeyError, match="not in the sharded model"):
        fsdp2_switch_optimizer_parameters(optimizer, {})


def test_modules_are_found_by_name() -> None:
    model, device = Tied(), torch.device("cpu")
    assert get_parameters_from_modules(None, model, device) == set()
    assert get_parameters_from_modules([model.middle], model, device) == set(model.middle.parameters())
    assert get_parameters_from_modules("mid.*", model, device) == set(model.middle.parameters())
    assert isinstance(get_fsdp2_grad_scaler(device="cpu", init_scale=2.0), torch.amp.GradScaler)


def test_a_model_without_ties_is_initialised_as_it_is() -> None:
    def initialise(module: nn.Module) -> None: ...

    assert ensure_weights_retied(initialise, nn.Linear(2, 2), torch.device("cpu")) is initialise


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(width: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.usefixtures("one_rank")
def test_files_by_rank_of_other_shapes_are_told(tmp_path: Path) -> None:
    plugin = SimpleNamespace(state_dict_type=StateDictType.SHARDED_STATE_DICT)
    accelerator = SimpleNamespace(wait_for_everyone=dist.barrier)
    save_fsdp_model(plugin, accelerator, sharded(6), tmp_path, use_dcp=False)
    with pytest.raises(ConfigurationError, match=r"'0\.weight' in shape \(6, 4\).*\(8, 4\).*use_dcp=True"):
        load_fsdp_model(plugin, accelerator, sharded(8), tmp_path, use_dcp=False)


@pytest.mark.usefixtures("one_rank")
def test_shards_that_do_not_fit_or_are_not_there_are_told(tmp_path: Path) -> None:
    plugin = SimpleNamespace(state_dict_type=StateDictType.SHARDED_STATE_DICT)
    accelerator = SimpleNamespace(wait_for_everyone=dist.barrier)
    with pytest.raises(CheckpointError, match=r"holds no shards: there is no '\.metadata'.*pytorch_model_fsdp_0"):
        load_fsdp_model(plugin, accelerator, sharded(6), tmp_path)
    save_fsdp_model(plugin, accelerator, sharded(6), tmp_path)
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp_0.*Build the model as it was"):
        load_fsdp_model(plugin, accelerator, sharded(8), tmp_path)


@pytest.fixture
def restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back the variable that a run under FSDP sets."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")


def on_one_process(**options: Any) -> Accelerator:
    precision = options.pop("mixed_precision", "no")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    return fresh_accelerator(fsdp_plugin=plugin, mixed_precision=precision)


@pytest.mark.usefixtures("restored_environment")
def test_weights_in_half_precision_are_trained_in_float32() -> None:
    accelerator = on_one_process(mixed_precision="bf16")
    with pytest.warns(
        UserWarning, match=r"2 parameters of Linear are trained in float32.*'bf16'.*mixed_precision='no'"
    ):
        model = accelerator.prepare(nn.Linear(2, 2).bfloat16())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.usefixtures("restored_environment")
def test_activations_of_no_blocks_are_told() -> None:
    accelerator = on_one_process(activation_checkpointing=True)
    with pytest.warns(UserWarning, match=r"activation_checkpointing=True finds no blocks.*Set auto_wrap_policy"):
        accelerator.prepare(nn.Linear(2, 2))


@pytest.mark.usefixtures("restored_environment")
def test_gradients_of_one_process_are_its_own() -> None:
    accelerator = on_one_process()
    model = accelerator.prepare(nn.Linear(2, 1, bias=False))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    found = accelerator.strategy.open_gradients(model)
    assert {name: value.tolist() for name, value in found.items()} == {"weight": [[1.0, 1.0]]}


def test_a_pattern_that_matches_nothing_is_told() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules="experts")
    with pytest.raises(
        ConfigurationError, match=r"ignored_modules='experts'\) matches no module of Tied.*'\.\*experts'"
    ):
        ignored_modules(plugin, Tied())
