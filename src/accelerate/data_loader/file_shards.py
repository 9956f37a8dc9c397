"""Iterable datasets in files: each process reads its own files, and all stay in step although these differ in length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate._base.helpers import warn_once
from accelerate.collectives.base import communicator
from accelerate.data_loader.dispatcher import CannotJoinError, count_rows, cut_rows, join_rows
from accelerate.data_loader.iterables import AnnotatedBatch, LeftInFiles
from accelerate.data_loader.order import EpochOrder
from accelerate.data_loader.plan import BatchSize, Observations, ObservedPlan, Share
from accelerate.data_loader.progress import DataSource, OpenedPass, ResumePoint
from accelerate.runtime import current


class FileShard(IterableDataset[Any], DataSource):
    """The files of an iterable dataset that one process reads.

    An epoch that was begun on another number of processes is finished as they would have read it: the rest of the files of
    each of those is read by all, and each takes its batches in turn.

    Args:
        dataset: A dataset of the `datasets` package with at least as many files as there are processes.
        batch_size: Rows of a process's batch.
    """

    def __init__(self, dataset: Any, batch_size: int, num_processes: int, process_index: int) -> None:
        self.whole = dataset
        self.dataset = dataset.shard(num_shards=num_processes, index=process_index)
        self.batch_size = batch_size
        self.num_processes = num_processes
        self.process_index = process_index
        self.order = EpochOrder()
        self.observed = Observations()
        self.files: tuple[int, ...] = ()
        """Samples that each process had handed out of its files before the pass."""
        self.is_common = False
        """Whether all read what is left of an epoch that another number of processes began."""
        self._passed_over = 0

    @property
    def total_batch_size(self) -> int:
        """Samples of a step over all processes."""
        return self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch it is."""
        self.whole.set_epoch(epoch)
        self.dataset.set_epoch(epoch)

    def goes_on_after(self, point: ResumePoint) -> bool:
        """Return whether as many processes have read their own files up to the point."""
        return len(point.files) == self.num_processes and sum(point.files) == point.samples

    def open_pass(self, loader: Any, point: ResumePoint, *, dataset_is_placed: bool) -> OpenedPass:
        """Begin a pass: elements are passed over, or whole batches so that several workers keep their turns."""
        # Those who shared out the elements of all files read like one process.
        own = point.files or (0,) * (1 if point.start else self.num_processes)
        self.files = own
        self.is_common = point.start > 0 and not self.goes_on_after(point)
        dropped = 0
        if self.is_common:
            self._passed_over = point.start - sum(own)
        elif loader.num_workers > 1:
            self._passed_over, dropped = 0, -(-own[self.process_index] // self.batch_size)
        else:
            self._passed_over = 0 if dataset_is_placed else own[self.process_index]
        return OpenedPass(ObservedPlan(point.samples), loader, dropped)

    def __iter__(self) -> Iterator[Any]:
        return self._common_elements() if self.is_common else islice(iter(self.dataset), self._passed_over, None)

    def _common_elements(self) -> Iterator[Any]:
        """Yield this process's batches of what others have left in their files."""
        elements = islice(iter(LeftInFiles(self.whole, self.files)), self._passed_over, None)
        begin = self.process_index * self.batch_size
        while group := list(islice(elements, self.total_batch_size)):
            yield from group[begin : begin + self.batch_size]


def in_step(batches: Iterable[Any], batch_size: int) -> Iterator[tuple[AnnotatedBatch, list[int], bool]]:
    """Yield batches on all processes until none of them has any; those that have less repeat their first samples.

    The processes tell each other at each step how many rows they have.

    Yields:
        A batch with its size, the rows of each process, and whether it is the last.
    """
    reading = (batch if type(batch) is AnnotatedBatch else AnnotatedBatch(batch) for batch in batches)
    here = next(reading, None)
    rows = _exchange_rows(here)
    spare = _exchange_spare(here, rows)
    state = None
    while any(rows):
        ahead = next(reading, None)
        upcoming = _exchange_rows(ahead)
        state = state if here is None else here.state
        real = rows[communicator().rank]
        batch = _completed(None if here is None else here.batch, real, spare, max(rows))
        share = Share(count_rows(batch), real)
        samples = sum(rows)
        size = BatchSize(share, samples, 0 if samples == batch_size * len(rows) else samples)
        if 0 in rows and any(upcoming):
            warn_once(
                f"The files of an iterable dataset differ in length: rank {rows.index(0)} has read its own and repeats samples "
                "while others go on. Use files of equal length, let rank 0 read for all with dispatch_batches=True, or allow "
                "different numbers of batches with even_batches=False."
            )
        yield AnnotatedBatch(batch, size, state), rows, not any(upcoming)
        here, rows = ahead, upcoming


def _exchange_rows(batch: AnnotatedBatch | None) -> list[int]:
    own = 0 if batch is None else count_rows(batch.batch) or 1
    gathered: list[int] = communicator().gather(torch.tensor([own], device=current.runtime().device)).tolist()
    return gathered


def _exchange_spare(batch: AnnotatedBatch | None, rows: list[int]) -> Any:
    """Return a batch to repeat samples of: one's own, or that of another process if this one has none at all."""
    if all(rows) or not any(rows):
        return None if batch is None else batch.batch
    values = [None if batch is None else batch.batch]
    communicator().broadcast_objects(values, next(rank for rank, count in enumerate(rows) if count))
    return values[0] if batch is None else batch.batch


def _completed(batch: Any, rows: int, spare: Any, size: int) -> Any:
    """Return the batch, made as large as the others by samples of another one."""
    if batch is None:
        return spare
    available = count_rows(spare) or 0
    missing = min(size - rows, available)
    if missing <= 0:
        return batch
    try:
        return join_rows([batch, cut_rows(spare, available, slice(0, missing))], [rows, missing])
    except CannotJoinError:
        return batch
