"""The arithmetic of sharding: which process gets which rows of the global order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Share(NamedTuple):
    """What one process holds of a batch: its rows, and how many of the leading ones are real; None if unknown.

    `full` are the rows of a batch that is not the last, where all processes hold equally many.
    """

    rows: int | None
    real: int | None
    full: int | None = None


class MicroBatch(NamedTuple):
    """The part of an optimizer step that a batch stands for.

    `weight` is what a loss averaged over this process's rows is multiplied by, so that the mean over the processes of
    the summed losses is the mean over the window's `samples`.
    """

    weight: float
    closes_window: bool
    samples: int


UNKNOWN_SHARE = Share(None, None)


def clamp(value: int, low: int, high: int) -> int:
    """Return the number of the interval that is nearest to `value`."""
    return max(low, min(value, high))


def near_equal(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return begin and end of one of `parts` consecutive pieces whose sizes differ by at most one."""
    size, extra = divmod(total, parts)
    begin = index * size + min(index, extra)
    return begin, begin + size + (index < extra)


def data_shard(
    rank: int, world_size: int, mesh_sizes: dict[str, int] | None, *, divides_by_tensor_parallel: bool = False
) -> tuple[int, int]:
    """Return (index, count) of the data-parallel share of a process.

    Args:
        mesh_sizes: size of each named axis of the device mesh; tensor-, context- and pipeline-parallel peers read the
            same data.
        divides_by_tensor_parallel: whether an engine owns the layout, so that only tensor parallelism is divided out.
    """
    if not mesh_sizes:
        return rank, world_size
    tensor, context = mesh_sizes.get("tp", 1), mesh_sizes.get("cp", 1)
    if divides_by_tensor_parallel:
        return rank // tensor, world_size // tensor
    shares = mesh_sizes.get("dp_replicate", 1) * mesh_sizes.get("dp_shard", 1)
    # The stages of a pipeline are the outermost axis.
    return rank // (tensor * context) % shares, shares


@dataclass(frozen=True)
class Rounds:
    """Cut an epoch into rounds of one batch a process, all batches of one size but for the end.

    Args:
        total: samples of the epoch, None if unknown.
        batch_size: rows of a batch as the loader was given it: with `split`, of all processes together.
        even: whether the last round is completed with repeats, so that every process has the same rows.
        start: samples of the epoch that were handed out before.
    """

    total: int | None
    batch_size: int
    num_processes: int = 1
    split: bool = False
    even: bool = True
    drop_last: bool = False
    start: int = 0

    @property
    def unit(self) -> int:
        """Global samples of a full round."""
        return self.batch_size if self.split else self.batch_size * self.num_processes

    @property
    def rows(self) -> int:
        """Rows of a process in a full round."""
        return self.unit // self.num_processes

    @property
    def remainder(self) -> int:
        """Real samples of an incomplete last round, 0 if it is complete, -1 if there is none or it is unknown."""
        if self.total is None or self.drop_last:
            return -1
        return max(self.total - self.start, 0) % self.unit

    def batches(self, rank: int) -> int | None:
        """Return how many batches `rank` gets from `start` on, None if that is unknown."""
        if self.total is None:
            return None
        full, rest = divmod(max(self.total - self.start, 0), self.unit)
        if rest == 0 or self.drop_last:
            return full
        return full + bool(self.share(rank, full).rows)

    def consumed(self, rounds: int) -> int:
        """Return the global samples handed out once `rounds` rounds are."""
        reached = self.start + rounds * self.unit
        return reached if self.total is None else min(reached, max(self.total, self.start))

    def share(self, rank: int, number: int) -> Share:
        """Return what `rank` holds in round `number`, counted from 0."""
        full = self.rows if self.num_processes == 1 else None
        if self.total is None:
            return Share(self.rows, self.rows, full)
        left = self.total - self.start - number * self.unit
        real = clamp(left - rank * self.rows, 0, self.rows)
        padded = self.even and self.num_processes > 1
        return Share(self.rows if padded else real, real, full)


class Block(NamedTuple):
    """One micro-batch of a window: global samples [begin, end) over all processes."""

    begin: int
    end: int
    window_samples: int
    closes_window: bool


@dataclass(frozen=True)
class Windows:
    """Cut an epoch into windows of a fixed number of global samples, each one optimizer step.

    A window is cut into as few blocks as keep a process's slice within `batch_size` rows; blocks and slices are
    consecutive and of nearly equal size. A window that was begun before `start` is finished first.
    """

    size: int
    batch_size: int
    num_processes: int = 1
    total: int | None = None
    drop_last: bool = False
    start: int = 0

    def num_blocks(self, samples: int) -> int:
        """Return into how many micro-batches so many samples are cut."""
        return -(-samples // (self.num_processes * self.batch_size))

    @property
    def end(self) -> int | None:
        """The sample after the last that is handed out."""
        if self.total is None:
            return None
        return self.total - self.total % self.size if self.drop_last else self.total

    def window(self, begin: int) -> tuple[int, int]:
        """Return (end, samples) of the window that `begin` lies in; it may have been begun before."""
        first = begin - begin % self.size
        end = first + self.size if self.end is None else min(first + self.size, self.end)
        return end, end - first

    def cut(self, begin: int, end: int, samples: int) -> list[Block]:
        """Return the blocks of [begin, end), the rest of a window of `samples`."""
        count = self.num_blocks(end - begin)
        pieces = [near_equal(end - begin, count, index) for index in range(count)]
        return [
            Block(begin + low, begin + high, samples, index == count - 1) for index, (low, high) in enumerate(pieces)
        ]

    def block(self, number: int) -> Block | None:
        """Return block `number` of the pass, counted from 0; None after the last."""
        begin = self.start
        if begin % self.size:
            end, samples = self.window(begin)
            count = self.num_blocks(max(end - begin, 0))
            if number < count:
                return self.cut(begin, end, samples)[number]
            begin, number = end, number - count
        whole = self.num_blocks(self.size)
        begin += number // whole * self.size
        if self.end is not None and begin >= self.end:
            return None
        end, samples = self.window(begin)
        blocks = self.cut(begin, end, samples)
        return blocks[number % whole] if number % whole < len(blocks) else None

    @property
    def length(self) -> int:
        """Micro-batches of a pass; needs a known total."""
        if self.end is None:
            raise TypeError("the number of samples is unknown")
        end, count, begin = self.end, 0, self.start
        if begin % self.size and begin < end:
            stop, _ = self.window(begin)
            count, begin = self.num_blocks(stop - begin), stop
        whole, rest = divmod(max(end - begin, 0), self.size)
        return count + whole * self.num_blocks(self.size) + self.num_blocks(rest)

    def slice_of(self, block: Block, rank: int) -> tuple[int, int]:
        """Return the global samples [begin, end) of a block that belong to `rank`; may be empty."""
        low, high = near_equal(block.end - block.begin, self.num_processes, rank)
        return block.begin + low, block.begin + high

    def share(self, block: Block, rank: int) -> Share:
        """Return what `rank` holds of a block: a process without a sample holds one row that is not real."""
        begin, end = self.slice_of(block, rank)
        return Share(max(end - begin, 1), end - begin)

    def micro_batch(self, block: Block, rank: int) -> MicroBatch:
        """Return the weight of `rank`'s slice of a block in its window."""
        begin, end = self.slice_of(block, rank)
        weight = self.num_processes * (end - begin) / block.window_samples
        return MicroBatch(weight, block.closes_window, block.window_samples)

    def starting_at(self, start: int) -> Windows:
        """Return the same plan for a pass that begins after `start` samples."""
        return replace(self, start=start)
