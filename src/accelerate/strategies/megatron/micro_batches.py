"""Loaders whose batches have the rows of several parts, which go through a model one by one."""

from __future__ import annotations

import copy
import math
from typing import Any

from torch.utils.data import BatchSampler

_MARK = "_has_rows_of_a_step"


class MergedBatches(BatchSampler):
    """Batches of another sampler, several at a time as one.

    Args:
        batch_sampler: Gives the batches.
        count: How many make one; the last may be made of fewer.
    """

    def __init__(self, batch_sampler: Any, count: int) -> None:
        self.batch_sampler = batch_sampler
        self.count = count
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.batch_size = count * (getattr(batch_sampler, "batch_size", None) or 1)

    def __len__(self) -> int:
        return math.ceil(len(self.batch_sampler) / self.count)

    def __iter__(self) -> Any:
        merged: list[Any] = []
        held = 0
        for batch in self.batch_sampler:
            merged += batch
            held += 1
            if held == self.count:
                yield merged
                merged, held = [], 0
        if merged:
            yield merged


def enlarged(loader: Any, count: int) -> Any:
    """Return a loader whose batches have `count` times the rows of this one, marked as such; the given one stays."""
    larger = copy.copy(loader)
    larger.__dict__[_MARK] = True
    if count == 1:
        return larger
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is BatchSampler:
        larger.__dict__["batch_sampler"] = BatchSampler(sampler.sampler, sampler.batch_size * count, sampler.drop_last)
    elif sampler is not None:
        larger.__dict__["batch_sampler"] = MergedBatches(sampler, count)
    if getattr(loader, "batch_size", None):
        # torch guards these names against changes, because they are no longer looked at once batches are sampled.
        larger.__dict__["batch_size"] = loader.batch_size * count
    return larger


def is_enlarged(loader: Any) -> bool:
    """Return whether the batches of a loader have the rows of a step already."""
    return bool(getattr(loader, _MARK, False))
