"""A kind of hardware that only the test knows, with a group backend of its own, on two real processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_group
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator
from accelerate._base.enums import DistributedType
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend

pytestmark = pytest.mark.multiprocess


@dataclass(frozen=True)
class WarpBackend(DeviceBackend):
    """Hardware of two devices whose tensors are the CPU's."""

    calls: Counter[Any] = field(default_factory=Counter)

    def is_available(self) -> bool:
        return True

    def device(self, index: int | None = None) -> torch.device:
        self.calls["device", index] += 1
        return torch.device("cpu")

    def ddp_device_ids(self, device: torch.device) -> list[int] | None:
        self.calls["ddp_device_ids"] += 1
        return None

    def barrier_device_ids(self, device: torch.device) -> list[int] | None:
        self.calls["barrier_device_ids"] += 1
        return None


def make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def run() -> dict[str, Any]:
    dist.Backend.register_backend("warpgroup", make_group, devices=["cpu"])
    backend = WarpBackend("warp", DistributedType.MULTI_MUSA, "warpgroup", priority=1000)
    registry.register(backend)
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    model = accelerator.prepare(model)
    model(torch.ones(1, 2) * (accelerator.process_index + 1)).sum().backward()
    accelerator.wait_for_everyone()
    return {
        "label": accelerator.distributed_type,
        "backend": (accelerator.state.backend, dist.get_backend()),
        "wrapped": isinstance(model, DistributedDataParallel),
        "gradient": model.module.weight.grad.tolist(),
        "calls": dict(backend.calls),
    }


def test_a_run_takes_everything_from_the_registered_hardware() -> None:
    for rank, found in enumerate(run_group(run, 2)):
        assert found["label"] is DistributedType.MULTI_MUSA
        assert found["backend"] == ("warpgroup", "warpgroup")
        assert found["wrapped"]
        assert found["gradient"] == [[1.5, 1.5]]
        assert found["calls"] == {("device", rank): 1, "ddp_device_ids": 1, "barrier_device_ids": 1}
