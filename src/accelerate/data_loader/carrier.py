"""Batches that bring along what only their reader knows: how many of their rows are real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

# Private in torch (2.13 and before): the only way to pin what a carrier holds as the loader would have.
from torch.utils.data._utils.pin_memory import pin_memory as _pin_memory

from accelerate.data_loader.iterables import IterableDatasetShard


class Counted:
    """A batch and a note for the loader, which unpacks it before the user sees it."""

    __slots__ = ("batch", "note")

    def __init__(self, batch: Any, note: Any) -> None:
        self.batch = batch
        self.note = note

    def pin_memory(self) -> Counted:
        """Pin the batch as torch would; called by its loader."""
        return Counted(_pin_memory(self.batch), self.note)


class GroupNote(NamedTuple):
    """The number of real elements of a group, and the worker that read it."""

    real: int
    worker: int = 0


class CountingCollate:
    """Collate as asked, and mark the batches of an incomplete group with its number of real elements.

    It runs where its shard runs (the two are copied into a worker together), so it can ask the shard. Where there are
    several workers each batch is marked: how far each of their streams was read cannot be known otherwise.
    """

    def __init__(self, collate: Callable[[Any], Any], shard: IterableDatasetShard) -> None:
        self.collate = collate
        self.shard = shard

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        shard, worker = self.shard, get_worker_info()
        if worker is not None and worker.num_workers > 1:
            return Counted(batch, GroupNote(shard.group_real, worker.id))
        return batch if shard.group_real == shard.group_size else Counted(batch, GroupNote(shard.group_real))
