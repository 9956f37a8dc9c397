"""The place of this process among all processes of the run."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate._base.errors import ConfigurationError


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
