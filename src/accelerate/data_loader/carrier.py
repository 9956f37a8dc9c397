"""Batches that bring along what only their reader knows: how many of their rows are real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Private in torch (2.13 and before): the only way to pin what a carrier holds as the loader would have.
from torch.utils.data._utils.pin_memory import pin_memory as _pin_memory

from .iterables import IterableDatasetShard


class Counted:
    """A batch and a note for the loader, which unpacks it before the user sees it."""

    __slots__ = ("batch", "note")

    def __init__(self, batch: Any, note: Any) -> None:
        self.batch = batch
        self.note = note

    def pin_memory(self) -> Counted:
        """Pin the batch as torch would; called by its loader."""
        return Counted(_pin_memory(self.batch), self.note)


class CountingCollate:
    """Collate as asked, and mark the batches of an incomplete group with its number of real elements.

    It runs where its shard runs (the two are copied into a worker together), so it can ask the shard.
    """

    def __init__(self, collate: Callable[[Any], Any], shard: IterableDatasetShard) -> None:
        self.collate = collate
        self.shard = shard

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        shard = self.shard
        return batch if shard.group_real == shard.group_size else Counted(batch, shard.group_real)
