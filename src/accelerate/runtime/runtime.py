"""The facts of this process: its place among all, its device and how it reaches the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.devices.base import DeviceBackend


@dataclass(frozen=True)
class Topology:
    """Rank and size of the run and of this machine's part of it.

    Args:
        source: What told the ranks ("torchrun", "Open MPI", ...), for messages.
        init_method: Where the processes meet, if not through the environment.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "none"
    init_method: str | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and self.local_rank >= 0):
            raise ConfigurationError(
                f"{self.source} gave rank {self.rank!r}, world size {self.world_size!r} and local rank "
                f"{self.local_rank!r}: a rank must lie between 0 and the world size. "
                "Check the variables of the launcher, or start with `accelerate launch` or `torchrun`."
            )


@dataclass(frozen=True, kw_only=True)
class Runtime(Topology):
    """What a process knows of itself once it has started; it never changes.

    Args:
        group_backend: The backend of the process group, None when the process is alone.
        checked: Whether collectives compare their arguments across ranks first.
        reason: Why this device was chosen.
    """

    device: torch.device
    backend: DeviceBackend
    group_backend: str | None
    checked: bool
    reason: str
    is_distributed: bool = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "is_distributed", self.world_size > 1)
