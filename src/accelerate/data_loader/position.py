"""The position in an epoch, counted in global samples and so free of the number of processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Say where a loader stands: `samples` of epoch `epoch` were handed out, over all processes together."""

    epoch: int = 0
    samples: int = 0
