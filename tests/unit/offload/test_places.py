"""Places, and the device map: checked, and written short."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import torch
from tests.support.logs import logged
from torch import nn

from accelerate import dispatch_model
from accelerate.offload.places import (
    as_device,
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    flatten_device_map,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


def test_places_that_are_no_device_are_refused() -> None:
    with pytest.raises(ValueError, match="'disk'"):
        as_device("disk")
    with pytest.raises(ValueError, match="no accelerator found"):
        as_device(0)
    assert as_device("meta") == torch.device("meta")


@pytest.mark.parametrize(
    ("given_map", "expected"),
    [
        ({"a.b": 0, "a.c": 0, "d": 1}, {"a": 0, "d": 1}),
        ({"a.b": 0, "a.c": 1, "d": 1}, {"a.b": 0, "a.c": 1, "d": 1}),
        ({"a": "cpu", "b": "cpu"}, {"": "cpu"}),
        ({"a.b.c": 0}, {"a.b.c": 0}),
        ({"a.b.c": 0, "a.b.d": 0, "a.e": 1, "ab": 0}, {"a.b": 0, "a.e": 1, "ab": 0}),
    ],
)
def test_a_map_is_written_short(given_map: dict[str, int | str], expected: dict[str, int | str]) -> None:
    fixed = MappingProxyType(dict(given_map))
    assert clean_device_map(fixed) == expected
    assert clean_device_map(given_map) is given_map  # programs read the map that they gave
    assert given_map == expected


def test_a_map_is_shortened_below_one_module_only() -> None:
    assert clean_device_map({"a": 0, "b.x": 0, "b.y": 0}, "b") == {"a": 0, "b": 0}


def test_an_incomplete_map_is_refused_and_an_unknown_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"batchnorm\.weight.*linear2\.bias"):
        check_device_map(Net(), {"linear1": 0})
    with pytest.warns(UserWarning, match="'linear9'"):
        check_device_map(Net(), {"": 0, "linear9": 1})


def test_tied_weights_on_two_devices_are_warned_about() -> None:
    with logged(r"head\.weight"):
        check_tied_parameters_on_same_device([["embed.weight", "head.weight"]], {"embed": 0, "head": 1})
    check_tied_parameters_on_same_device([["embed.weight", "head.weight"]], {"": 0})


def test_entries_for_modules_that_are_not_there_place_nothing() -> None:
    model = Net()
    unknown = {"gone": "disk", "gone.part": "cpu"}
    flat = flatten_device_map(model, {"": "cpu", **unknown})
    assert flat == {"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu", "gone.part": "cpu"}
    with pytest.warns(UserWarning, match=r"\['gone', 'gone.part'\] of the device map name no module of Net"):
        dispatch_model(model, {"": "cpu", **unknown}, force_hooks=True, offload_dir="unused")
