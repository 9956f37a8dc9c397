"""The place of this process among all, as the record that programs import."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.runtime import rank_sources


@dataclass
class CPUInformation:
    """Rank and size of the run and of this machine's part of it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the ranks that torchrun, an MPI or Slurm gave this process; alone if none did."""
    found = rank_sources.detect()
    return CPUInformation(found.rank, found.world_size, found.local_rank, found.local_world_size)
