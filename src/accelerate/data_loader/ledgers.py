"""The account of a pass: what was handed out so far, and what this process holds of the batch at hand.

A batch is named by its number in the pass, counted from 1; nothing is computed before somebody asks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate.data_loader.iterables import IterableDatasetShard
from accelerate.data_loader.plan import UNKNOWN_SHARE, Block, MicroBatch, Rounds, Share, Windows, clamp
from accelerate.data_loader.position import Trail
from accelerate.data_loader.sharding import BatchSamplerShard, Records
from accelerate.data_loader.windows import WindowBatchSampler


class Ledger:
    """The account of a loader whose batches are taken as they come.

    Args:
        unit: global samples of a step, 0 if unknown.
        start: samples of the epoch that were handed out before the pass.
        skipped: batches of this process that the pass leaves out.
    """

    final: int | None = None
    """What was handed out when the loader began its next pass; None before that."""
    counted: int | None = None
    """How much of it the progress of the run has counted already."""

    def __init__(self, unit: int = 0, start: int = 0, skipped: int = 0) -> None:
        self.unit = unit
        self.start = start
        self.skipped = skipped

    @property
    def remainder(self) -> int | None:
        """Real samples of an incomplete last step as far as known now; None to fall back on the dataset's length."""
        return None

    @property
    def length(self) -> int | None:
        """Batches of this process in the pass, None if that is only known when they have come."""
        return None

    def consumed(self, number: int) -> int:
        """Return the global samples of the epoch handed out up to this batch."""
        return self.start + (number + self.skipped) * self.unit

    def share(self, number: int) -> Share:
        """Return rows and real rows of this process's batch."""
        return UNKNOWN_SHARE

    def micro_batch(self, number: int) -> MicroBatch | None:
        """Return the batch's part in its window, None without windows."""
        return None

    def note(self, number: int, note: Any) -> None:
        """Take what a batch brought along."""

    def trail(self, number: int) -> Trail:
        """Return how the place behind this batch was reached."""
        return Trail(self.unit)

    def is_boundary(self, number: int) -> bool:
        """Return whether nothing was read from the dataset beyond this batch."""
        return True


class SplitLedger(Ledger):
    """The account of a loader that was divided by somebody else: which rows repeat is not known."""

    @property
    def remainder(self) -> int | None:
        return -1


class RoundsLedger(Ledger):
    """The account of batches of one size, from a sampler that gives as many samples as it says."""

    def __init__(self, rounds: Rounds, rank: int, skipped: int = 0) -> None:
        super().__init__(rounds.unit, rounds.start, skipped)
        self.rounds = rounds
        self.rank = rank

    @property
    def remainder(self) -> int | None:
        return self.rounds.remainder

    @property
    def length(self) -> int | None:
        batches = self.rounds.batches(self.rank)
        return None if batches is None else max(batches - self.skipped, 0)

    def consumed(self, number: int) -> int:
        return self.rounds.consumed(number + self.skipped)

    def share(self, number: int) -> Share:
        return self.rounds.share(self.rank, number + self.skipped - 1)


class _Notes:
    """What a sampler notes of a pass that begins now."""

    def __init__(self, sampler: BatchSamplerShard | WindowBatchSampler) -> None:
        self._sampler = sampler
        self._before = sampler.records
        self._own: Records | None = None

    @property
    def records(self) -> Records:
        """The notes of the pass, which the sampler begins when it is opened."""
        if self._own is None and self._sampler.records is not self._before:
            self._own = self._sampler.records  # kept: a loader that skips batches of this one has the same sampler
        return self._own or self._before


class CountedLedger(Ledger):
    """The account of batches of one size, from a sampler that may give more or fewer samples than it says.

    Every round but the last is full, and a loader hands out the last one when it has seen the end of its sampler.
    """

    def __init__(self, shard: BatchSamplerShard, claimed: Rounds, skipped: int = 0) -> None:
        super().__init__(claimed.unit, claimed.start, skipped)
        self.rank = shard.process_index
        self.notes = _Notes(shard)
        self.claimed = claimed

    @property
    def rounds(self) -> Rounds:
        """The arithmetic of the pass, without a total before the sampler has ended."""
        return replace(self.claimed, total=self.notes.records.total)

    @property
    def remainder(self) -> int | None:
        return self.claimed.remainder if self.notes.records.total is None else self.rounds.remainder

    def consumed(self, number: int) -> int:
        return self.rounds.consumed(number + self.skipped)

    def share(self, number: int) -> Share:
        return self.rounds.share(self.rank, number + self.skipped - 1)


class RecordedLedger(Ledger):
    """The account of batches of varying size, read from the notes of their sampler."""

    def __init__(self, shard: BatchSamplerShard, start: int, skipped: int = 0) -> None:
        super().__init__(0, start, skipped)
        self.notes = _Notes(shard)

    @property
    def remainder(self) -> int | None:
        return self.notes.records.remainder

    def consumed(self, number: int) -> int:
        return self.start + sum(self.notes.records.round_real[: number + self.skipped])

    def share(self, number: int) -> Share:
        index = number + self.skipped - 1
        records = self.notes.records
        return Share(records.rows[index], records.real[index])


class GroupLedger(Ledger):
    """The account of groups of an iterable dataset; an incomplete one says its size when it comes."""

    def __init__(self, shard: IterableDatasetShard, start: int, skipped: int = 0, *, ready_batches: bool) -> None:
        super().__init__(shard.group_size, start, skipped)
        self.rank = shard.process_index
        self.rows = shard.group_size // shard.num_processes
        self.ready_batches = ready_batches
        self.missing = 0
        self.noted, self.real = 0, 0

    @property
    def remainder(self) -> int | None:
        if self.ready_batches:
            return -1
        return self.real if self.noted else 0

    def note(self, number: int, note: Any) -> None:
        self.noted, self.real = number, note.real
        self.missing += self.unit - note.real

    def consumed(self, number: int) -> int:
        return super().consumed(number) - self.missing

    def share(self, number: int) -> Share:
        real = self.rows
        if number == self.noted:
            real = clamp(self.real - self.rank * self.rows, 0, self.rows)
        if self.ready_batches:
            return Share(None, None if real else 0)
        return Share(self.rows, real)

    def is_short(self, number: int) -> bool:
        """Return whether the batch belongs to an incomplete group."""
        return self.noted == number


class StreamsLedger(GroupLedger):
    """The account of groups that several workers read in turns, each from a stream of its own that may end early.

    Args:
        streams: what each worker's stream gave before the pass.
        rounds: batches of the epoch before the pass that had groups of the same size, None if others came before.
    """

    def __init__(
        self, shard: IterableDatasetShard, start: int, streams: list[int], rounds: int | None, *, ready_batches: bool
    ) -> None:
        super().__init__(shard, start, ready_batches=ready_batches)
        self.streams = streams
        self.rounds = rounds
        self.total = self.passed_over = start

    def note(self, number: int, note: Any) -> None:
        self.total += note.real
        self.streams[note.worker] += note.real
        if number == 0:  # passed over: no batch of the pass
            self.passed_over = self.total
            self.rounds = None if self.rounds is None else self.rounds + 1
        elif note.real < self.unit:
            self.noted, self.real = number, note.real

    def consumed(self, number: int) -> int:
        return self.total if number else self.passed_over

    def trail(self, number: int) -> Trail:
        rounds = None if self.rounds is None else self.rounds + number
        return Trail(self.unit, streams=tuple(self.streams), rounds=rounds)


class WindowLedger(Ledger):
    """The account of micro-batches that are cut from windows.

    Args:
        counted: the sampler, if it may give more or fewer samples than it says.
    """

    def __init__(
        self, windows: Windows, rank: int, skipped: int = 0, counted: WindowBatchSampler | None = None
    ) -> None:
        super().__init__(0, windows.start, skipped)
        self.planned = windows
        self.rank = rank
        self.notes = None if counted is None else _Notes(counted)
        self.noted: tuple[int, Block] | None = None

    @property
    def remainder(self) -> int | None:
        return 0

    def note(self, number: int, note: Any) -> None:
        self.noted = (number, note)

    @property
    def windows(self) -> Windows:
        """The arithmetic of the pass; a short window is cut when its sampler has ended, so all before are full."""
        return self.planned if self.notes is None else replace(self.planned, total=self.notes.records.total)

    def _block(self, number: int) -> Block:
        if self.noted is not None and self.noted[0] == number:
            return self.noted[1]
        block = self.windows.block(number + self.skipped - 1)
        if block is None:
            raise IndexError(f"the pass has no micro-batch {number}")
        return block

    def consumed(self, number: int) -> int:
        return self._block(number).end if number else self.start

    def is_boundary(self, number: int) -> bool:
        return number == 0 or self._block(number).closes_window

    def share(self, number: int) -> Share:
        return self.windows.share(self._block(number), self.rank)

    def micro_batch(self, number: int) -> MicroBatch | None:
        return self.windows.micro_batch(self._block(number), self.rank)
