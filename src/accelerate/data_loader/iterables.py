"""The view that one process has of an iterable dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelerate.data_loader.sharding import check_splittable


class IterableDatasetShard(IterableDataset[Any]):
    """The elements of an iterable dataset that one process takes.

    Elements are read in groups of one batch a process (with `split_batches`: of one batch), of which each process takes
    its consecutive part. An incomplete last group is completed with the first elements unless `drop_last`.
    `group_real` is the number of real elements of the group at hand. With worker processes each worker does this for
    the elements that the dataset gives it.

    Raises:
        ConfigurationError: (a ValueError) if `split_batches` is asked for a size that cannot be split.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_splittable(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self.start = 0
        self.start_unit = 0
        self.start_streams: tuple[int, ...] = ()
        self.completes = True
        self.group_real = 0

    @property
    def group_size(self) -> int:
        """Elements of a group, over all processes."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and tell the dataset."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        length = len(self.dataset)  # type: ignore[arg-type]
        groups = length // self.group_size if self.drop_last else -(-length // self.group_size)
        return groups * (self.group_size // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        size = self.group_size
        rows = size // self.num_processes
        own = slice(self.process_index * rows, (self.process_index + 1) * rows)
        elements = iter(self.dataset)
        first = self._pass_over(elements, size)
        while group := list(islice(elements, size)):
            if not first:
                first = list(group)
            self.group_real = len(group)
            if len(group) < size:
                if self.drop_last:
                    return
                if self.completes:
                    group += islice(cycle(first), size - len(group))
            yield from group[own]

    def _pass_over(self, elements: Iterator[Any], size: int) -> list[Any]:
        """Drop the elements that were handed out before, and return the first of them."""
        dropped = worker_start(self.start, self.start_unit or size, self.start_streams)
        first = list(islice(elements, min(size, dropped)))
        next(islice(elements, dropped - len(first), dropped - len(first)), None)
        # Only a whole first group completes the last one as in a pass that was never stopped.
        return first if len(first) == size else []


def worker_start(start: int, unit: int, streams: tuple[int, ...] = ()) -> int:
    """Return how many elements of its own stream a worker has handed out when all together gave `start`.

    Workers take turns, a group of `unit` elements at a time, as long as their streams last; `streams` is what each of
    them gave, where that is known.
    """
    worker = get_worker_info()
    if worker is None or worker.num_workers == 1:
        return start
    if len(streams) == worker.num_workers:
        return streams[worker.id]
    groups, extra = divmod(start, unit)
    turns, rest = divmod(groups, worker.num_workers)
    return (turns + (worker.id < rest)) * unit + (extra if worker.id == rest else 0)
