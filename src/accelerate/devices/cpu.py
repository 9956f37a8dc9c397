"""The processor itself: always there, one device, no index."""

from __future__ import annotations

from typing import Any

import torch

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend


class CpuBackend(DeviceBackend):
    """The CPU: torch's own generator is its random state, and there is nothing to wait for or to free."""

    def is_available(self) -> bool:
        """Return True: a process always has its CPU."""
        return True

    def device_count(self) -> int:
        """Return 1: all cores together are one device."""
        return 1

    def device(self, index: int | None = None) -> torch.device:
        """Return the CPU device without an index, so that it equals the device of every CPU tensor."""
        return torch.device(self.type)

    def set_device(self, device: torch.device) -> None:
        """Do nothing: there is one CPU device."""

    def get_rng_state(self) -> Any:
        """Return None: torch's global generator is saved on its own."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Do nothing: torch's global generator is restored on its own."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: `torch.manual_seed` covers the CPU."""


BACKEND = CpuBackend(
    type="cpu",
    label=DistributedType.MULTI_CPU,
    group_backend="gloo",
    priority=-1,
    autocast_dtypes=frozenset({"float16", "bfloat16"}),
    needs_device_ids=False,
)
