"""The communicators of XLA devices, with torch_xla's collectives recorded: two ranks, the other of which holds a peer's value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate.collectives import xla
from accelerate.collectives.xla import DeviceCommunicator, GlobalTensorCommunicator, HostCommunicator

NAN = float("nan")


@dataclass
class RecordedModel:
    """`torch_xla.core.xla_model` of the first of two ranks."""

    peer: torch.Tensor = field(default_factory=lambda: torch.zeros(2))
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    reduced_in: torch.dtype | None = None

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_gather", value.dtype))
        return torch.cat([value, self.peer.to(value.dtype)])

    def all_reduce(self, op: str, value: Any, scale: float = 1.0) -> Any:
        self.calls.append(("all_reduce", op, scale))
        if isinstance(value, list):
            for tensor in value:
                tensor.add_(self.peer.to(tensor.dtype)).mul_(scale)
            return value
        self.reduced_in = value.dtype
        combined = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
        return combined(value, self.peer.to(value.dtype)) * scale


@dataclass
class StandIn:
    """The XLA backend, whose tensors are those in host memory here."""

    model: RecordedModel = field(default_factory=RecordedModel)
    type: str = "cpu"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setattr(xla, "XLA", stand_in)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield stand_in
    dist.destroy_process_group()


def two_ranks(kind: type[HostCommunicator]) -> Any:
    communicator = kind()
    communicator._world_size = 2
    return communicator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_gather(device: StandIn, dtype: torch.dtype) -> None:
    device.model.peer = torch.tensor([0, 1])
    gathered = two_ranks(DeviceCommunicator).gather(torch.tensor([1, 0]).to(dtype))
    assert gathered.dtype == dtype
    assert gathered.tolist() == torch.tensor([1, 0, 0, 1]).to(dtype).tolist()
    device.model.peer = torch.tensor([1])
    assert two_ranks(DeviceCommunicator).gather(torch.tensor(1).to(dtype)).shape == (2,)


@pytest.mark.parametrize(
    ("values", "op", "expected", "dtype"),
    [
        ([1.0, 5.0], "sum", [3.0, 6.0], torch.float32),
        ([1.0, 5.0], "mean", [1.5, 3.0], torch.float32),
        ([1.0, 5.0], "max", [2.0, 5.0], torch.float32),
        ([1, 5], "min", [1, 1], torch.int64),
        ([1, 5], "mean", [1.5, 3.0], torch.float32),
        ([True, False], "sum", [3, 1], torch.int64),
    ],
)
def test_reduce(device: StandIn, values: list[Any], op: Any, expected: list[Any], dtype: torch.dtype) -> None:
    device.model.peer = torch.tensor([2, 1])
    reduced = two_ranks(DeviceCommunicator).reduce(torch.tensor(values), op)
    assert (reduced.tolist(), reduced.dtype) == (expected, dtype)


def test_small_floats_are_added_in_large_ones(device: StandIn) -> None:
    device.model.peer = torch.tensor([1.0, 1.0])
    reduced = two_ranks(DeviceCommunicator).reduce(torch.tensor([256.0, 1.0], dtype=torch.bfloat16), "mean")
    assert (reduced.dtype, device.model.reduced_in) == (torch.bfloat16, torch.float32)


def test_a_broadcast_takes_nothing_from_other_ranks(device: StandIn) -> None:
    """Not even where they hold no numbers, which times zero are none either."""
    communicator = two_ranks(DeviceCommunicator)
    device.model.peer = torch.tensor([4.0, 5.0])
    value = torch.tensor([NAN, 7.0])
    assert communicator.broadcast(value, source=1) is value
    assert value.tolist() == [4.0, 5.0]
    device.model.peer = torch.zeros(2)
    flags = torch.tensor([True, False])
    assert communicator.broadcast(flags, source=0).tolist() == [True, False]


def test_gradients_are_averaged_in_one_exchange(device: StandIn) -> None:
    device.model.peer = torch.tensor([2.0, 1.0])
    gradients = [torch.tensor([4.0, 3.0]), torch.tensor([0.0, 1.0])]
    communicator = two_ranks(DeviceCommunicator)
    communicator.average(gradients)
    communicator.average([])
    assert [gradient.tolist() for gradient in gradients] == [[3.0, 2.0], [1.0, 1.0]]
    assert device.model.calls == [("all_reduce", "sum", 0.5)]


def test_tensors_in_host_memory_and_objects_use_the_group(device: StandIn) -> None:
    device.type = "xla"
    communicator = DeviceCommunicator()
    value = torch.tensor([1.0])
    assert communicator.gather(value).tolist() == communicator.reduce(value, "sum").tolist() == [1.0]
    assert communicator.broadcast(value) is value
    assert communicator.gather_object({"a": 1}) == [{"a": 1}]
    communicator.barrier()
    assert device.model.calls == []


def test_values_of_devices_that_do_not_reach_each_other_pass_through_the_host(device: StandIn) -> None:
    communicator = HostCommunicator()
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])
    communicator.average([first, second])
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [[3.0]])
    assert communicator.broadcast(first) is first
    assert device.model.calls == []


def test_a_tensor_on_all_devices_is_whole(device: StandIn) -> None:
    communicator = two_ranks(GlobalTensorCommunicator)
    value = torch.tensor([1.0, 2.0])
    assert communicator.gather(value) is value
    assert communicator.gather(torch.tensor(3.0)).shape == (1,)


@pytest.mark.parametrize(
    ("is_spmd", "device_ranks", "expected"),
    [(True, 1, GlobalTensorCommunicator), (False, 2, DeviceCommunicator), (False, 1, HostCommunicator)],
)
def test_the_choice(
    device: StandIn, is_spmd: bool, device_ranks: int, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Runtime:
        world_size = 2
        device = torch.device("cpu")

    class Module:
        @staticmethod
        def world_size() -> int:
            return device_ranks

    device.is_spmd, device.runtime = is_spmd, Module  # type: ignore[attr-defined]
    assert type(xla.choose_communicator(Runtime)) is expected  # type: ignore[arg-type]
