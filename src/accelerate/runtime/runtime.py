"""The facts of this process: its place, its device and how it reaches the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerate.devices.base import DeviceBackend
from accelerate.runtime.topology import Topology


@dataclass(frozen=True)
class Runtime:
    """What a process knows of itself once it has started; it never changes.

    Args:
        group_backend: The backend of the process group, None when the process is alone.
        checked: Whether collectives compare their arguments across ranks first.
        reason: Why this device was chosen.
    """

    topology: Topology
    device: torch.device
    backend: DeviceBackend
    group_backend: str | None
    checked: bool
    reason: str

    @property
    def rank(self) -> int:
        """Return the global rank."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """Return the number of processes of the run."""
        return self.topology.world_size

    @property
    def local_rank(self) -> int:
        """Return the rank on this machine."""
        return self.topology.local_rank

    @property
    def is_distributed(self) -> bool:
        """Return whether there is more than one process."""
        return self.topology.world_size > 1
