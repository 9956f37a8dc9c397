"""Which gradients a process sums up before they are exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientShare:
    """The gradients of one process among those of all.

    Args:
        index: Which share of the data they are of; processes that work on a layer together have the same.
        count: The shares that are averaged.
        stage: Which layers they are of.
        stages: The parts into which the layers are divided.
    """

    index: int
    count: int
    stage: int = 0
    stages: int = 1


def gradient_share(rank: int, world_size: int, sizes: Mapping[str, int]) -> GradientShare:
    """Return the share of a process; `sizes` are those of the axes of the mesh, none without one."""
    if not sizes:
        return GradientShare(rank, world_size)
    stages = sizes.get("pp", 1)
    # Outermost are the stages, innermost the ranks of one layer; what is between has data of its own.
    count = world_size // (stages * sizes.get("tp", 1))
    return GradientShare(rank // sizes.get("tp", 1) % count, count, rank * stages // world_size, stages)
