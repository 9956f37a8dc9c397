"""The lane to an accelerator, on stand-ins for streams and events: this suite runs where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typing_extensions import Self

from accelerate.devices import registry
from accelerate.devices.copy_lane import CopyLane

LOG: list[str] = []


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> Self:
        LOG.append("on the lane")
        return self

    def __exit__(self, *error: object) -> None:
        LOG.append("off the lane")

    def wait_event(self, event: Event) -> None:
        LOG.append(f"wait for {event.number}")


class Event:
    count = 0

    def __init__(self, device: torch.device) -> None:
        Event.count += 1
        self.number = Event.count

    def record(self, stream: Stream) -> None:
        LOG.append(f"record {self.number}")

    def synchronize(self) -> None:
        LOG.append(f"buffer of {self.number} is free")


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    Event.count = 0
    empty = torch.empty

    def without_pinning(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            LOG.append(f"pin {args[0]}")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", without_pinning)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(device))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: LOG.append("record stream"))


def test_tensors_go_through_two_buffers_in_turn() -> None:
    lane = CopyLane(torch.device("cpu"))
    sent = [torch.full((2, 3), float(number)) for number in range(3)]
    arrivals = [lane.send(tensor, torch.bfloat16) for tensor in sent]
    for tensor, arrival in zip(sent, arrivals, strict=True):
        assert torch.equal(arrival.take(), tensor.to(torch.bfloat16))
    sending = ["on the lane", "record {0}", "off the lane"]
    expected = [
        *["pin 24", *sending],
        *["pin 24", *sending],
        *["buffer of 1 is free", *sending],
    ]
    assert LOG[: len(expected)] == [line.format(1 + index // 4) for index, line in enumerate(expected)]
    assert LOG[len(expected) :] == [word for n in (1, 2, 3) for word in (f"wait for {n}", "record stream")]


def test_a_larger_tensor_gets_a_larger_buffer() -> None:
    lane = CopyLane(torch.device("cpu"), num_buffers=1)
    lane.send(torch.ones(2), torch.float32)
    assert torch.equal(lane.send(torch.ones(5), torch.float32).take(), torch.ones(5))
    assert [line for line in LOG if line.startswith("pin")] == ["pin 8", "pin 20"]


def test_a_device_without_streams_has_no_lane() -> None:
    assert registry.get("meta").copy_lane(torch.device("meta")) is None
