"""Weights that hooks keep elsewhere: brought back for a while, and read whole."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import disk_offload
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, attach_align_device_hook
from accelerate.hooks.offloaded import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)

META = torch.device("meta")


def with_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("scratch", torch.zeros(1), persistent=False)
    return model


def offloaded() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = with_buffers().eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=dict(weights))
    return model, weights


def test_offloaded_weights_are_brought_back_for_a_while() -> None:
    model, weights = offloaded()
    assert has_offloaded_params(model[0])
    assert not has_offloaded_params(nn.Linear(1, 1))
    assert model[0].weight.device == META
    with align_module_device(model[0]):
        assert torch.equal(model[0].weight, weights["0.weight"])
    assert model[0].weight.device == META
    plain = nn.Linear(2, 2)
    with align_module_device(plain, "meta"):
        assert plain.weight.device == META


def test_an_appended_hook_does_not_hide_offloaded_weights() -> None:
    model, _ = offloaded()
    add_hook_to_module(model[0], ModelHook(), append=True)
    assert has_offloaded_params(model[0])


def test_the_whole_state_dict_of_an_offloaded_model() -> None:
    model, weights = offloaded()
    found = get_state_dict_offloaded_model(model)
    assert list(found) == list(weights)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert model[0].weight.device == META
    entries = get_state_dict_from_offload(model[0], "0.weight", {"0.weight": "?", "1.weight": "?"})
    assert torch.equal(entries["0.weight"], weights["0.weight"])
    assert entries["1.weight"] == "?"


def test_weights_that_are_nowhere_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    add_hook_to_module(model[0], AlignDevicesHook(execution_device="cpu", offload=True))
    assert list(get_state_dict_offloaded_model(model)) == ["0.weight", "0.bias"]
    assert "1.weight" in caplog.text


def test_a_module_with_its_weights_is_aligned_and_keeps_its_changes() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    with align_module_device(layer):
        assert layer.weight is weight
    with align_module_device(layer, "cpu"), torch.no_grad():
        layer.weight.fill_(3)
    assert torch.equal(layer.weight, torch.full((2, 2), 3.0))
    with align_module_device(layer, "meta"):
        assert layer.weight.device == META
    assert torch.equal(layer.weight, torch.full((2, 2), 3.0))


def test_the_state_dict_has_a_shared_module_under_all_its_names(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    wanted = layer.weight.detach().clone()
    model = disk_offload(nn.Sequential(layer, nn.ReLU(), layer), tmp_path, execution_device="cpu")
    found = get_state_dict_offloaded_model(model)
    assert set(found) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert torch.equal(found["0.weight"], wanted)
    assert torch.equal(found["2.weight"], wanted)


def test_a_dtype_that_changed_after_the_weights_went_to_the_disk_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    inputs = torch.rand(2, 4, dtype=torch.float64)
    expected = copy.deepcopy(model).double()(inputs)
    disk_offload(model, tmp_path, execution_device="cpu", offload_buffers=True)
    model.double()
    assert torch.equal(model(inputs), expected)
    assert model[0].weight.device == META
    assert model[0].weight.dtype == torch.float64


def test_what_is_put_in_the_place_of_an_offloaded_weight_gives_way_to_it(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    inputs = torch.rand(2, 4)
    expected = layer(inputs)
    disk_offload(layer, tmp_path, execution_device="cpu")
    layer.weight = nn.Parameter(torch.zeros(4, 4))
    assert torch.equal(layer(inputs), expected)
    assert layer.weight.device == META
    assert isinstance(layer.weight, nn.Parameter)
