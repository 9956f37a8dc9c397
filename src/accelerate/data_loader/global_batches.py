"""Global batches: a fixed number of samples for each optimizer step, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, IterableDataset

from accelerate.data_loader.iterables import AnnotatedBatch
from accelerate.data_loader.order import EpochOrder, has_exact_length, head_and_rest
from accelerate.data_loader.plan import EpochPlan, MicroBatch, Observations, Share, near_equal
from accelerate.data_loader.progress import DataSource, OpenedPass, ResumePoint


class Block(NamedTuple):
    """One micro-batch of a global batch: global samples [begin, end) over all processes."""

    begin: int
    end: int
    batch_samples: int
    is_last: bool


@dataclass(frozen=True)
class GlobalBatchPlan(EpochPlan):
    """Global batches of `size` samples, each one optimizer step on any number of processes.

    A global batch is cut into as few blocks as keep a process's slice within `batch_size` rows; blocks and slices are
    consecutive and of nearly equal size. A global batch that was begun before `start` is finished first.

    Args:
        left_out: Samples at the start of each epoch that no pass reads.
    """

    size: int
    batch_size: int
    num_processes: int = 1
    total: int | None = None
    drop_last: bool = False
    start: int = 0
    rank: int = 0
    left_out: int = 0

    @property
    def remainder(self) -> int | None:
        return 0

    def with_total(self, total: int | None) -> GlobalBatchPlan:
        return replace(self, total=total)

    def starting_at(self, start: int) -> GlobalBatchPlan:
        """Return the plan of a pass that begins after `start` samples."""
        return replace(self, start=max(start, self.left_out))

    @property
    def end(self) -> int | None:
        """The sample after the last that is handed out."""
        if self.total is None:
            return None
        return self.total - self.total % self.size if self.drop_last else self.total

    def num_blocks(self, samples: int) -> int:
        """Return into how many micro-batches so many samples are cut."""
        return -(-samples // (self.num_processes * self.batch_size))

    def cut(self, begin: int, end: int, samples: int) -> list[Block]:
        """Return the blocks of [begin, end), the rest of a global batch of `samples`."""
        count = self.num_blocks(end - begin)
        pieces = [near_equal(end - begin, count, index) for index in range(count)]
        return [
            Block(begin + low, begin + high, samples, index == count - 1) for index, (low, high) in enumerate(pieces)
        ]

    def _global_batch(self, begin: int) -> tuple[int, int]:
        """Return (end, samples) of the global batch that `begin` lies in; it may have been begun before."""
        first = begin - begin % self.size
        end = first + self.size if self.end is None else min(first + self.size, self.end)
        return end, end - first

    def block(self, number: int) -> Block | None:
        """Return block `number` of the pass; None after the last."""
        begin, index = self.start, number - 1
        if begin % self.size:
            end, samples = self._global_batch(begin)
            count = self.num_blocks(max(end - begin, 0))
            if index < count:
                return self.cut(begin, end, samples)[index]
            begin, index = end, index - count
        whole = self.num_blocks(self.size)
        begin += index // whole * self.size
        if self.end is not None and begin >= self.end:
            return None
        end, samples = self._global_batch(begin)
        blocks = self.cut(begin, end, samples)
        return blocks[index % whole] if index % whole < len(blocks) else None

    @property
    def length(self) -> int:
        """Micro-batches of a pass; needs a known total."""
        if self.end is None:
            raise TypeError("the number of samples is unknown")
        end, count, begin = self.end, 0, self.start
        if begin % self.size and begin < end:
            stop, _ = self._global_batch(begin)
            count, begin = self.num_blocks(stop - begin), stop
        whole, rest = divmod(max(end - begin, 0), self.size)
        return count + whole * self.num_blocks(self.size) + self.num_blocks(rest)

    def slices(self, elements: Iterator[Any], observed: Observations) -> Iterator[list[Any]]:
        """Yield what this process takes of each micro-batch, and note the total if the last global batch is short.

        Args:
            elements: Indices or samples from `start` on.
        """
        begin = self.start
        while True:
            first = begin - begin % self.size
            batch = list(islice(elements, first + self.size - begin))
            end = begin + len(batch)
            is_short = end - first < self.size
            if not batch or (is_short and self.drop_last):
                return
            if is_short:
                observed.total = end
            for block in self.cut(begin, end, end - first):
                low, high = self._slice_of(block)
                # A process without a sample goes through the step with one that counts for nothing.
                yield batch[low - begin : high - begin] or batch[:1]
            if is_short:
                return
            begin = end

    def _slice_of(self, block: Block) -> tuple[int, int]:
        """Return the global samples [begin, end) of a block that belong to this process; may be empty."""
        low, high = near_equal(block.end - block.begin, self.num_processes, self.rank)
        return block.begin + low, block.begin + high

    def _block_at(self, number: int) -> Block:
        block = self.block(number)
        if block is None:
            raise IndexError(f"the pass has no micro-batch {number}")
        return block

    def consumed(self, number: int) -> int:
        return self._block_at(number).end if number else self.start

    def ends_reading(self, number: int) -> bool:
        return number == 0 or self._block_at(number).is_last

    def share(self, number: int) -> Share:
        """Return what this process holds: without a sample, one row that is not real."""
        begin, end = self._slice_of(self._block_at(number))
        return Share(max(end - begin, 1), end - begin)

    def micro_batch(self, number: int) -> MicroBatch | None:
        block = self._block_at(number)
        begin, end = self._slice_of(block)
        weight = self.num_processes * (end - begin) / block.batch_samples
        return MicroBatch(weight, block.is_last, block.batch_samples)


class GlobalBatchSampler(BatchSampler, DataSource):
    """The slices of each global batch that one process takes, as lists of indices.

    Args:
        plan: The sizes; total and start are filled in for each pass.
    """

    def __init__(self, sampler: Any, plan: GlobalBatchPlan) -> None:
        self.sampler: Any = sampler
        self.sizes = plan
        self.num_processes = plan.num_processes
        self.batch_size = plan.batch_size
        self.drop_last = plan.drop_last
        self.order = EpochOrder()
        self.epoch = 0
        self.start = 0
        self.observed = Observations()

    @property
    def total_batch_size(self) -> int:
        """Samples of a global batch."""
        return self.sizes.size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.sizes.with_total(len(self.sampler)).starting_at(0).length

    def plan(self, start: int = 0) -> GlobalBatchPlan:
        """Return the plan of a pass that begins after `start` samples; it has a total if that is sure."""
        total = len(self.sampler) if has_exact_length(self.sampler) else None
        return self.sizes.with_total(total).starting_at(start)

    def open_pass(self, loader: Any, point: ResumePoint, *, dataset_is_placed: bool) -> OpenedPass:
        """Begin a pass: indices are passed over, no sample is read."""
        self.start = point.start
        return OpenedPass(self.plan(point.start), loader)

    def __iter__(self) -> Iterator[list[int]]:
        self.observed = Observations()
        plan = self.plan(self.start)
        if self.start == 0:
            return self._iterate(plan, self.observed)
        # Opened at once: what the rest of a pass draws for it is put back when the loader has begun to read.
        _, indices = head_and_rest(self.sampler, 0, plan.start, self.order, self.epoch)
        return plan.slices(indices, self.observed)

    def _iterate(self, plan: GlobalBatchPlan, observed: Observations) -> Iterator[list[int]]:
        # Opened at the first index: `RandomSampler` draws its seed there, after the loader has drawn its own.
        yield from plan.slices(head_and_rest(self.sampler, 0, plan.start, self.order, self.epoch)[1], observed)


class GlobalBatchDataset(IterableDataset[Any], DataSource):
    """The slices of each global batch that one process takes of an iterable dataset, as lists of elements."""

    def __init__(self, dataset: Iterable[Any], plan: GlobalBatchPlan) -> None:
        self.dataset = dataset
        self.plan = plan
        self.num_processes = plan.num_processes
        self.passed_over = 0
        self.order = EpochOrder()
        self.observed = Observations()

    @property
    def total_batch_size(self) -> int:
        """Samples of a global batch."""
        return self.plan.size

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset which epoch it is."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return self.plan.with_total(len(self.dataset)).starting_at(0).length  # type: ignore[arg-type]

    def open_pass(self, loader: Any, point: ResumePoint, *, dataset_is_placed: bool) -> OpenedPass:
        """Begin a pass: elements are read and passed over, unless the dataset stands there already."""
        self.plan = self.plan.starting_at(point.start)
        self.passed_over = 0 if dataset_is_placed else self.plan.start
        return OpenedPass(self.plan, loader)

    def __iter__(self) -> Iterator[list[Any]]:
        self.observed = Observations()
        return self.plan.slices(islice(iter(self.dataset), self.passed_over, None), self.observed)


class GlobalBatchCollate:
    """Collate the elements of a slice; if the last global batch is short, only its reader knows, and sends it along."""

    def __init__(self, collate: Callable[[Any], Any], dataset: GlobalBatchDataset) -> None:
        self.collate = collate
        self.dataset = dataset

    def __call__(self, samples: list[Any]) -> Any:
        total = self.dataset.observed.total
        batch = self.collate(samples)
        return batch if total is None else AnnotatedBatch(batch, total)
