"""The steps of sharding that programs call by themselves, on one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

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
