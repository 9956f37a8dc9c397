"""Weights that hooks keep elsewhere: found by the names of the state dict, and known as one under two names."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks.offloaded import offloaded_weights
from accelerate.offload.store import OffloadedWeightsLoader, PrefixedDataset, identity_of_stored, offload_state_dict


class Block(nn.Module):
    """A module that uses the weights of its children without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.left.weight @ self.right.weight


def test_names_and_values(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), nn.BatchNorm1d(4))
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    assert offloaded_weights(model) == {}
    cpu_offload(model, execution_device="cpu", offload_buffers=True, preload_module_classes=["Block"])
    found = offloaded_weights(model)
    empty = {name for name, value in model.state_dict().items() if value.device.type == "meta"}
    assert set(found) == empty
    assert {"0.left.weight", "0.right.weight", "1.weight", "1.running_mean"} <= empty
    for name, weight in found.items():
        assert torch.equal(weight.read(), wanted[name])


def test_a_dispatched_model_names_what_is_not_there(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wanted = model[1].weight.detach().clone()
    dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    found = offloaded_weights(model)
    assert sorted(found) == ["1.bias", "1.weight"]
    assert torch.equal(found["1.weight"].read(), wanted)


def test_a_shared_module_is_found_under_all_its_names(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    model = disk_offload(nn.Sequential(layer, nn.ReLU(), layer), tmp_path, execution_device="cpu")
    found = offloaded_weights(model)
    assert sorted(found) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert found["0.weight"].identity == found["2.weight"].identity
    assert found["0.weight"].identity != found["0.bias"].identity


def test_identity_in_memory_and_in_files(tmp_path: Path) -> None:
    one, other = torch.ones(2), torch.ones(2)
    held = {"a.x": one, "a.y": one, "a.z": other}
    assert identity_of_stored(held, "a.x") == identity_of_stored(held, "a.y") != identity_of_stored(held, "a.z")
    assert identity_of_stored(PrefixedDataset(held, "a."), "x") == identity_of_stored(held, "a.x")

    offload_state_dict(tmp_path, {"b.x": one, "b.z": one})
    folder = OffloadedWeightsLoader(held, save_folder=tmp_path)
    folder.add_aliases([["b.x", "b.y"]])
    assert folder.identity("a.x") == folder.identity("a.y")
    assert folder.identity("b.x") == folder.identity("b.y")
    # Two files with the same bytes may be two weights that happen to be equal.
    assert folder.identity("b.x") != folder.identity("b.z")

    file = tmp_path / "weights.safetensors"
    save_file({"x": one, "z": other}, file)
    index = {name: {"safetensors_file": str(file), "weight_name": name[-1]} for name in ("c.x", "d.x", "c.z")}
    weights = OffloadedWeightsLoader(index=index)
    assert weights.identity("c.x") == weights.identity("d.x") != weights.identity("c.z")


@pytest.mark.parametrize("empty", [True, False])
def test_no_identity_where_only_reading_would_tell(empty: bool) -> None:
    held = {"x": torch.empty(0) if empty else torch.ones(2)}
    assert identity_of_stored(held if empty else MappingProxyType(held), "x") is None
