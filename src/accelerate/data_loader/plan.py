"""The arithmetic of an epoch: sizes and a start in, the batches of one process and their place in the epoch out.

A plan is a value: it reads no data and remembers nothing. A batch is named by its number in the pass, counted from 1.
What only reading shows (how many samples an uncounted sampler gave, how large a batch was) is in `Observations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from typing import Any, ClassVar, NamedTuple


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
    the summed losses is the mean over the step's `samples`.
    """

    weight: float
    closes_window: bool
    samples: int


class BatchSize(NamedTuple):
    """The size of a batch that only its reader knew.

    `samples` are the real ones over all processes; `remainder` is that number if the batch is an incomplete last one,
    0 if it is complete, -1 if nobody can tell.
    """

    share: Share
    samples: int
    remainder: int = 0
    worker: int = 0


@dataclass
class Observations:
    """What the reading of one epoch has shown so far.

    Args:
        total: Samples of the epoch, once a sampler that could not say it has ended.
        batches: Sizes of the batches that were drawn and not yet handed out, where they vary.
        left_out: Samples of the first batches, which every pass leaves out, where batches vary in size.
        first: The indices of the epoch's first batch, for a process that reads alone.
    """

    total: int | None = None
    batches: deque[BatchSize] = field(default_factory=deque)
    left_out: int = 0
    first: list[int] = field(default_factory=list)


UNKNOWN_SHARE = Share(None, None)


def clamp(value: int, low: int, high: int) -> int:
    """Return the number of the interval that is nearest to `value`."""
    return max(low, min(value, high))


def near_equal(total: int, parts: int, index: int) -> tuple[int, int]:
    """Return begin and end of one of `parts` consecutive pieces whose sizes differ by at most one."""
    size, extra = divmod(total, parts)
    begin = index * size + min(index, extra)
    return begin, begin + size + (index < extra)


class EpochPlan:
    """What every plan answers; the defaults are those of batches about which nothing is known."""

    start: int
    """Global samples of the epoch that were handed out before the pass."""
    is_observed: ClassVar[bool] = False
    """Whether sizes are known only when the batches come, so that they are counted instead of computed."""
    has_notes: ClassVar[bool] = False
    """Whether batches bring a note along that says their size."""
    streams: tuple[int, ...] = ()
    """Samples that each worker's own stream gave before the pass, where workers have streams of their own."""
    rounds: int | None = 0
    """Batches of the epoch before the pass that had the same size, None if others came before."""

    @property
    def unit(self) -> int:
        """Global samples of a step, 0 if unknown."""
        return 0

    @property
    def remainder(self) -> int | None:
        """Real samples of an incomplete last step, 0 if it is complete, -1 if unknown; None to ask the dataset."""
        return None

    @property
    def num_batches(self) -> int | None:
        """Batches of this process from `start` on, None if that is only known when they have come."""
        return None

    def consumed(self, number: int) -> int:
        """Return the global samples of the epoch handed out up to batch `number`."""
        return self.start + number * self.unit

    def share(self, number: int) -> Share:
        """Return what this process holds of batch `number`."""
        return UNKNOWN_SHARE

    def micro_batch(self, number: int) -> MicroBatch | None:
        """Return the part of an optimizer step that batch `number` is, None without a global batch size."""
        return None

    def ends_reading(self, number: int) -> bool:
        """Return whether nothing was read from the dataset beyond batch `number`."""
        return True

    def size_of(self, note: Any) -> BatchSize:
        """Return the size of a batch by the note that came with it; for observed plans."""
        size: BatchSize = note
        return size

    def with_total(self, total: int) -> EpochPlan:
        """Return the plan for an epoch of `total` samples."""
        return self


@dataclass(frozen=True)
class PlainPlan(EpochPlan):
    """Batches that are taken as they come, `unit` global samples a step.

    Args:
        remainder: -1 if another sampler or dataset divided the data, so that repeated rows are not known.
    """

    unit: int = 0
    start: int = 0
    remainder: int | None = None
    num_batches: int | None = None


@dataclass(frozen=True)
class ObservedPlan(EpochPlan):
    """Batches that say their size when they come."""

    start: int = 0
    is_observed: ClassVar[bool] = True


@dataclass(frozen=True)
class RoundPlan(EpochPlan):
    """Rounds of one batch a process, all batches of one size but for the end.

    Args:
        total: Samples of the epoch, None if unknown.
        batch_size: Rows of a batch as the loader was given it: with `split`, of all processes together; None if unknown.
        even: Whether the last round is completed with repeats, so that every process has the same rows.
        is_exact: Whether `total` can be relied on.
        is_believed: Whether that is because a sampler of the user says so: what it gave is known when it has given it.
    """

    total: int | None
    batch_size: int | None
    num_processes: int = 1
    split: bool = False
    even: bool = True
    drop_last: bool = False
    start: int = 0
    rank: int = 0
    is_exact: bool = True
    is_believed: bool = False

    @property
    def unit(self) -> int:
        """Global samples of a full round."""
        return self.rows * self.num_processes

    @property
    def rows(self) -> int:
        """Rows of a process in a full round."""
        size = self.batch_size or 0
        return size // self.num_processes if self.split else size

    @property
    def remainder(self) -> int | None:
        if self.total is None or self.drop_last:
            return -1
        return max(self.total - self.start, 0) % self.unit

    @property
    def num_batches(self) -> int | None:
        if self.total is None or not self.is_exact:
            return None
        full, rest = divmod(max(self.total - self.start, 0), self.unit)
        if rest == 0 or self.drop_last:
            return full
        return full + (self.is_believed or bool(self.share(full + 1).rows))

    def consumed(self, number: int) -> int:
        reached = self.start + number * self.unit
        return min(reached, max(self.total, self.start)) if self.total is not None and self.is_exact else reached

    def share(self, number: int) -> Share:
        if self.is_believed:
            return UNKNOWN_SHARE
        full = self.rows if self.num_processes == 1 else None
        if self.total is None or not self.is_exact:
            return Share(self.rows, self.rows, full)
        left = self.total - self.start - (number - 1) * self.unit
        real = clamp(left - self.rank * self.rows, 0, self.rows)
        padded = self.even and self.num_processes > 1
        return Share(self.rows if padded else real, real, full)

    def with_total(self, total: int) -> RoundPlan:
        return replace(self, total=total, is_exact=True, is_believed=False)

    @property
    def batches_per_round(self) -> int:
        """Batches of the inner batch sampler that make a round."""
        return 1 if self.split else self.num_processes

    def deal(
        self, batches: Iterable[list[int]], first: list[list[int]] | None = None
    ) -> Iterator[tuple[list[int], BatchSize]]:
        """Yield this process's indices of each round, and their size.

        Args:
            batches: What is left of the epoch, of any sizes.
            first: The epoch's first round, which completes the last one, if `batches` does not begin with it.
        """
        width = self.batches_per_round
        learns = not first
        first = first or []
        group: list[list[int]] = []
        for batch in batches:
            if len(group) == width:  # its last batch was short, but it is not the end: hand it out as it is
                yield from self._own_part(group, group, remainder=0)
                group = []
            group.append(batch)
            if learns and len(first) < width:
                first.append(batch)
            if len(group) == width and (self.batch_size is None or len(batch) >= self.batch_size):
                yield from self._own_part(group, group, remainder=0)
                group = []
        if group and not self.drop_last:
            yield from self._own_part(group, first, remainder=sum(map(len, group)))

    def _own_part(
        self, group: list[list[int]], first: list[list[int]], remainder: int
    ) -> Iterator[tuple[list[int], BatchSize]]:
        """Yield what this process takes of a round, which may be nothing; `first` completes it if even."""
        total = sum(map(len, group))
        is_completed = remainder > 0 and self.even and self.num_processes > 1
        if (self.split and self.num_processes > 1) or (is_completed and self.batch_size is not None):
            rows = max(self.rows, -(-total // self.num_processes))
            begin = self.rank * rows
            real = clamp(total - begin, 0, rows)
            own = list(chain.from_iterable(group))[begin : begin + rows]
            if self.even and real < rows:
                pool = cycle(chain.from_iterable(first))
                own += islice(pool, begin + real - total, begin + rows - total)
        elif self.rank < len(group):
            own, real = group[self.rank], len(group[self.rank])
        else:
            # Batches of unknown size are completed with whole batches.
            own, real = first[(self.rank - len(group)) % len(first)] if self.even else [], 0
        if own:
            yield own, BatchSize(Share(len(own), real), total, remainder)


@dataclass(frozen=True)
class VaryingRoundPlan(RoundPlan):
    """Rounds of batches of any size, from a batch sampler of the user.

    Args:
        length: How many batches the epoch has, if that is known.
    """

    length: int | None = None
    rounds: int | None = None
    is_observed: ClassVar[bool] = True

    @property
    def unit(self) -> int:
        """No round is as large as another."""
        return 0

    @property
    def remainder(self) -> int | None:
        return -1

    @property
    def num_batches(self) -> int | None:
        return None if self.length is None or self.rounds is None else max(self.length - self.rounds, 0)


@dataclass(frozen=True)
class GroupPlan(EpochPlan):
    """Groups of `unit` elements of an iterable dataset, of which each process takes a consecutive part.

    Args:
        has_ready_batches: Whether an element is a whole batch, whose rows are not known.
    """

    unit: int = 1
    start: int = 0
    num_processes: int = 1
    rank: int = 0
    has_ready_batches: bool = False
    streams: tuple[int, ...] = ()
    rounds: int | None = 0
    is_observed: ClassVar[bool] = True
    has_notes: ClassVar[bool] = True

    @property
    def remainder(self) -> int | None:
        return -1

    def size_of(self, note: GroupNote | None) -> BatchSize:
        samples, worker = note or (self.unit, 0)
        rows = self.unit // self.num_processes
        real = clamp(samples - self.rank * rows, 0, rows)
        if self.has_ready_batches:
            return BatchSize(Share(None, None if real else 0), samples, -1, worker)
        share = Share(rows if self.num_processes > 1 else real, real)  # one process has no others to keep up with
        return BatchSize(share, samples, samples if samples < self.unit else 0, worker)


class GroupNote(NamedTuple):
    """The number of real elements of a group, and the worker that read it."""

    real: int
    worker: int = 0
