"""Bytes of tensors and modules, and the memory that plans may use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate._base.enums import CustomDtype, DistributedType
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.offload.memory import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    free_memory_of,
    get_balanced_memory,
    get_max_memory,
    get_module_leaves,
)
from accelerate.offload.places import as_device
from accelerate.offload.plan import infer_auto_device_map


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        (7.9, 7),
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("1.5MB", 1_500_000),
        ("3kb", 375),
        ("8Mb", 10**6),
        ("2KiB", 2048),
    ],
)
def test_sizes_are_read_with_their_units(text: int | str, size: int) -> None:
    assert convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["10", "7B", "GB", "-1GB", "5 parsecs"])
def test_a_size_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        convert_file_size_to_int(text)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.bool, 0.125), (torch.float8_e4m3fn, 1), (torch.bfloat16, 2), (torch.int64, 8), (CustomDtype.INT4, 0.5)],
)
def test_bytes_of_an_element(dtype: Any, size: float) -> None:
    assert dtype_byte_size(dtype) == size


def test_sizes_of_modules_add_up() -> None:
    sizes = compute_module_sizes(Net())
    assert (sizes[""], sizes["linear1"], sizes["linear1.weight"], sizes["batchnorm"]) == (236, 64, 48, 72)
    half = compute_module_sizes(Net(), dtype=torch.float16)
    assert (half[""], half["batchnorm.num_batches_tracked"]) == (122, 8)  # integers are not cast
    assert compute_module_sizes(Net(), dtype="float64")[""] == 236  # a larger dtype does not make it larger
    special = compute_module_sizes(Net(), dtype="float16", special_dtypes={"linear1.weight": torch.float32})
    assert special["linear1"] == 56
    assert compute_module_total_buffer_size(Net()) == 40
    assert calculate_maximum_sizes(Net()) == (236, (100, ["linear2"]))
    assert set(get_module_leaves(sizes)) == set(Net().state_dict())


def test_memory_limits_are_read_and_ordered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        limits = get_max_memory({"disk": "1GB", "cpu": 5, 1: "1KB", 0: 7})
    assert list(limits.items()) == [(0, 7), (1, 1000), ("cpu", 5), ("disk", 10**9)]
    assert "device 1" in caplog.text  # there is no such accelerator here, so the plan cannot be run here
    with pytest.raises(ValueError, match="'moon'"):
        get_max_memory({"moon": 3})


@pytest.mark.parametrize(
    "read",
    [get_max_memory, partial(get_balanced_memory, Net()), partial(infer_auto_device_map, Net())],
    ids=["get_max_memory", "get_balanced_memory", "infer_auto_device_map"],
)
def test_limits_given_as_text_become_bytes_in_place(read: Callable[[Mapping[int | str, int | str]], object]) -> None:
    given: dict[int | str, int | str] = {"disk": "1MB", "cpu": "100KB"}
    read(given)
    assert list(given.items()) == [("disk", 10**6), ("cpu", 10**5)]  # in the order of the caller
    read(MappingProxyType({"cpu": "100KB"}))  # what cannot be changed is read all the same


def test_without_accelerators_the_free_memory_of_the_host_counts() -> None:
    limits = get_max_memory()
    assert list(limits) == ["cpu"]
    assert limits["cpu"] > 0


@dataclass(frozen=True)
class FakeBackend(DeviceBackend):
    """Two accelerators with memory, by a device type that torch knows and nobody here has."""

    integrated: bool = False
    indexed: bool = True

    @property
    def module(self) -> Any:
        return SimpleNamespace(
            mem_get_info=lambda index: (1000 * (index + 1), 10_000),
            get_device_properties=lambda index: SimpleNamespace(is_integrated=self.integrated),
        )

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def device(self, index: int | None = None) -> torch.device:
        return torch.device(self.type, index) if self.indexed and index is not None else torch.device(self.type)


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> Iterator[FakeBackend]:
    backend = FakeBackend(
        type="maia", label=DistributedType.MULTI_GPU, group_backend="gloo", priority=1000, **request.param
    )
    registry.register(backend)
    yield backend
    registry.unregister(backend.type)


@pytest.mark.parametrize("fake", [{}], indirect=True)
def test_free_memory_of_accelerators_comes_first(fake: FakeBackend) -> None:
    limits = get_max_memory()
    assert list(limits) == [0, 1, "cpu"]
    assert (limits[0], limits[1]) == (1000, 2000)
    assert as_device(1) == torch.device("maia:1")


@pytest.mark.parametrize("fake", [{"integrated": True}], indirect=True)
def test_integrated_accelerators_share_the_memory_of_the_host(fake: FakeBackend) -> None:
    assert list(get_max_memory()) == [0, 1]


@pytest.mark.parametrize("fake", [{"indexed": False}], indirect=True)
def test_an_accelerator_without_an_index_is_named_by_its_type(
    fake: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is free on this machine changes between two looks.
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**9))
    assert get_max_memory() == {"maia": 10**9}
    assert get_balanced_memory(Net()) == {"maia": 0.9 * 10**9}  # the rest is for activations


@pytest.mark.parametrize(
    ("memory", "low_zero", "expected"),
    [
        ({0: 300}, False, {0: 300}),
        ({0: 300, 1: 500}, False, {0: 215, 1: 500}),  # 236 / 2 + 1.25 * 78
        ({0: 300, 1: 500}, True, {0: 0, 1: 500}),
        ({0: 300, 1: 500, 2: 500}, False, {0: 175, 1: 175, 2: 500}),
        ({0: 300, 1: 500, 2: 500}, True, {0: 0, 1: 215, 2: 500}),
        ({0: 500, 1: 100}, True, {0: 136, 1: 100}),
        ({0: 500, 1: 0, "cpu": 9}, False, {0: 500, 1: 0, "cpu": 9}),
        ({"cpu": 100}, False, {"cpu": 100}),
    ],
)
def test_balanced_memory_spreads_a_model(
    memory: dict[int | str, int | str], low_zero: bool, expected: dict[int | str, int]
) -> None:
    assert get_balanced_memory(Net(), memory, low_zero=low_zero) == expected


@pytest.mark.parametrize("fake", [{}], indirect=True)
def test_the_free_memory_of_one_device_is_its_own(fake: FakeBackend) -> None:
    assert free_memory_of(torch.device("maia:1"), 7) == 2000
    assert free_memory_of(torch.device("cpu"), 7) == free_memory_of(torch.device("maia"), 7) == 7
