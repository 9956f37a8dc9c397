"""The ranks that write one checkpoint together, and how they agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate._base.errors import CheckpointError
from accelerate.collectives.base import Communicator
from accelerate.runtime.topology import Topology

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """What went wrong on a rank, in words that can be sent to the others."""

    rank: int
    text: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Put an error into words."""
        return cls(rank, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Team:
    """The ranks of a run, seen from one of them.

    Args:
        communicator: How they talk.
        topology: The rank's place.
        each_node: Every machine has a disk of its own, and its first rank writes what all ranks have in common.
    """

    communicator: Communicator
    topology: Topology
    each_node: bool = False

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.topology.world_size

    @property
    def leads(self) -> bool:
        """Whether this rank writes what all ranks have in common, and publishes."""
        return (self.topology.local_rank if self.each_node else self.rank) == 0

    @property
    def leader(self) -> int:
        """The rank that leads on the disk of this one."""
        return self.rank - self.topology.local_rank if self.each_node else 0

    def share(self, value: T | Failure, target: object, doing: str) -> list[T]:
        """Return the values of the ranks that write to the same disk, in the order of ranks.

        Raises:
            CheckpointError: The same on every rank, if any rank has a failure instead of a value.
        """
        entries: list[tuple[int, Any]] = self.communicator.gather_object((self.leader, value))
        failures = [entry for _, entry in entries if isinstance(entry, Failure)]
        if failures:
            first = failures[0]
            others = f" ({len(failures) - 1} other rank(s) failed too)" if len(failures) > 1 else ""
            raise CheckpointError(
                f"The checkpoint {str(target)!r} could not be {doing}. Rank {first.rank}: {first.text}{others}"
            )
        return [entry for leader, entry in entries if leader == self.leader]
