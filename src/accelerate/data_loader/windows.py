"""Batches cut from windows of a fixed number of global samples, one window an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset

from accelerate.data_loader.carrier import Counted
from accelerate.data_loader.plan import Block, Windows
from accelerate.data_loader.samplers import FixedOrder, Ordering, head_and_rest
from accelerate.data_loader.sharding import Records, gives_what_it_says


class WindowBatchSampler(BatchSampler):
    """The slices of each window that one process takes, as lists of indices."""

    def __init__(self, sampler: Any, windows: Windows, process_index: int = 0) -> None:
        self.sampler: Any = sampler
        self.windows = windows
        self.process_index = process_index
        self.num_processes = windows.num_processes
        self.batch_size = windows.batch_size
        self.drop_last = windows.drop_last
        self.ordering: Ordering = FixedOrder()
        self.epoch = 0
        self.start = 0
        self.records = Records()

    @property
    def has_exact_length(self) -> bool:
        """Whether the number of samples of a pass is known before it."""
        return gives_what_it_says(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        return replace(self.windows, total=len(self.sampler)).length

    def plan(self, start: int) -> Windows:
        """Return the arithmetic of a pass that begins after `start` samples; it has a total if that is sure."""
        return replace(self.windows, total=len(self.sampler) if self.has_exact_length else None, start=start)

    def __iter__(self) -> Iterator[list[int]]:
        self.records = Records()
        plan = self.plan(self.start)
        if self.start == 0:
            return self._iterate(plan, self.records)
        # Opened at once: what the rest of a pass draws for it is put back when the loader has begun to read.
        _, order = head_and_rest(self.sampler, 0, self.start, self.ordering, self.epoch)
        return self._cut(order, plan, self.records)

    def _iterate(self, plan: Windows, records: Records) -> Iterator[list[int]]:
        # Opened at the first index: `RandomSampler` draws its seed there, after the loader has drawn its own.
        yield from self._cut(head_and_rest(self.sampler, 0, 0, self.ordering, self.epoch)[1], plan, records)

    def _cut(self, order: Iterator[int], plan: Windows, records: Records) -> Iterator[list[int]]:
        for indices, block in _slices(order, plan, self.process_index):
            if block.window_samples < plan.size:  # the last window
                records.total = block.begin - block.begin % plan.size + block.window_samples
            yield indices


class WindowDataset(IterableDataset[Any]):
    """The slices of each window that one process takes of an iterable dataset, as lists of elements."""

    def __init__(self, dataset: Iterable[Any], windows: Windows, process_index: int = 0) -> None:
        self.dataset = dataset
        self.windows = windows
        self.process_index = process_index
        self.num_processes = windows.num_processes
        self.start = 0
        self.is_placed = False
        self.block: Block | None = None

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch it is."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        size = self.windows
        total = len(self.dataset)  # type: ignore[arg-type]
        return Windows(size.size, size.batch_size, size.num_processes, total, size.drop_last).length

    def __iter__(self) -> Iterator[list[Any]]:
        elements = islice(iter(self.dataset), 0 if self.is_placed else self.start, None)
        for samples, block in _slices(elements, self.windows.starting_at(self.start), self.process_index):
            self.block = block
            yield samples


class WindowCollate:
    """Collate the elements of a slice, and send the block along: the last window's size is known to its reader only."""

    def __init__(self, collate: Callable[[Any], Any], dataset: WindowDataset) -> None:
        self.collate = collate
        self.dataset = dataset

    def __call__(self, samples: list[Any]) -> Counted:
        return Counted(self.collate(samples), self.dataset.block)


def _slices(order: Iterator[Any], plan: Windows, rank: int) -> Iterator[tuple[list[Any], Block]]:
    begin = plan.start
    while True:
        first = begin - begin % plan.size
        window = list(islice(order, first + plan.size - begin))
        end = begin + len(window)
        is_short = end - first < plan.size
        if not window or (is_short and plan.drop_last):
            return
        for block in plan.cut(begin, end, end - first):
            low, high = plan.slice_of(block, rank)
            # A process without a sample goes through the step with one that counts for nothing.
            yield window[low - begin : high - begin] or window[:1], block
        if is_short:
            return
        begin = end
