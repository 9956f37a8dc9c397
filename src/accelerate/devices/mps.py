"""Apple GPUs."""

from __future__ import annotations

import torch

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend


class MpsBackend(DeviceBackend):
    """Metal: one device without an index."""

    def is_available(self) -> bool:
        """Return whether Metal is built in and usable."""
        return torch.backends.mps.is_available()

    def device_count(self) -> int:
        """Return 1: Metal shows one device to a process."""
        return 1

    def device(self, index: int | None = None) -> torch.device:
        """Return the Metal device, which has no index."""
        return torch.device(self.type)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the one Metal generator."""
        torch.mps.manual_seed(seed)


BACKEND = MpsBackend(
    type="mps",
    label=DistributedType.NO,
    group_backend="gloo",
    priority=90,
    rng_key="torch_mps_manual_seed",
    autocast_dtypes=frozenset({"float16", "bfloat16"}),
    needs_device_ids=False,
    # Operators that Metal lacks fall back to the CPU; torch reads this variable at first use.
    process_variables=(("PYTORCH_ENABLE_MPS_FALLBACK", "1"),),
)
