"""The position in an epoch, counted in global samples and so free of the number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Position:
    """Say where a loader stands: `samples` of epoch `epoch` were handed out, over all processes together."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Trail:
    """How a position was reached, which matters for data that cannot be indexed.

    Args:
        unit: global samples of a step, 0 if unknown.
        workers: processes that read for one loader of an iterable dataset, 0 if unknown.
        streams: samples that each worker's own stream has handed out, where there are several.
        rounds: batches since the start of the epoch, None if they had different sizes.
        dataset: the state of a dataset that can save its own.
    """

    unit: int = 0
    workers: int = 0
    streams: tuple[int, ...] = ()
    rounds: int | None = None
    dataset: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        state: dict[str, Any] = {"unit": self.unit}
        if self.workers:
            state["workers"] = self.workers
        if self.streams:
            state |= {"streams": list(self.streams), "rounds": self.rounds}
        if self.dataset is not None:
            state["dataset"] = self.dataset
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Trail:
        """Return what `state_dict` gave."""
        return cls(
            state.get("unit", 0),
            state.get("workers", 0),
            tuple(state.get("streams", ())),
            state.get("rounds"),
            state.get("dataset"),
        )
