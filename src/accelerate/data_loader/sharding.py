"""The view that one process has of a batch sampler."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate._base.errors import ConfigurationError
from accelerate.data_loader.plan import Rounds, clamp
from accelerate.data_loader.samplers import FixedOrder, Ordering, SeedableRandomSampler, head_and_rest

_FIXED_ORDER = FixedOrder()
_EXACT_SAMPLERS = {
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    SeedableRandomSampler,
}


def gives_what_it_says(sampler: Any) -> bool:
    """Return whether a sampler surely gives as many samples as its `len` says; a user's own may not."""
    return type(sampler) in _EXACT_SAMPLERS


def check_splittable(batch_size: int | None, num_processes: int) -> None:
    """Refuse to split batches of a size that is unknown or no multiple of the number of processes.

    Raises:
        ConfigurationError: (a ValueError) if the batches cannot be split.
    """
    if batch_size is None:
        raise ConfigurationError(
            "split_batches=True was given a loader of batch_size=None: batches of unknown size cannot be cut into equal "
            "parts; give the loader or its batch sampler a `batch_size`, or leave split_batches=False"
        )
    if batch_size % num_processes:
        fitting = max(batch_size // num_processes, 1) * num_processes
        raise ConfigurationError(
            f"split_batches=True was given batch_size={batch_size!r}, which {num_processes} processes cannot share "
            f"equally; use a multiple of {num_processes} such as batch_size={fitting}, or leave split_batches=False"
        )


class _Piece(NamedTuple):
    """The indices that a process takes of a round, how many of them are real, and the real ones of the round."""

    indices: list[int]
    real: int
    round_real: int


class Records:
    """What was handed out in a pass: of batches of varying size three numbers a batch, of others their sum."""

    def __init__(self) -> None:
        self.rows, self.real, self.round_real = array("q"), array("q"), array("q")
        self.remainder = 0
        self.total: int | None = None
        """Samples of the epoch, if they had to be counted; None until the sampler has ended."""

    def add(self, piece: _Piece) -> None:
        """Note one batch."""
        self.rows.append(len(piece.indices))
        self.real.append(piece.real)
        self.round_real.append(piece.round_real)


class BatchSamplerShard(BatchSampler):
    """The batches of a batch sampler that one process takes.

    Batches go to the processes in turns; with `split_batches` each batch is cut into one part a process. Unless the
    batch sampler drops its last batch, the last round is completed with the first samples of the epoch
    (`even_batches`), or handed out as it is.

    Args:
        batch_sampler: Any iterable of lists of indices; `batch_size` and `drop_last` are read from it if it has them.

    Raises:
        ConfigurationError: (a ValueError) if `split_batches` is asked for a size that cannot be split.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_size: int = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if split_batches:
            check_splittable(self.batch_size, num_processes)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.ordering: Ordering = _FIXED_ORDER
        self.epoch = 0
        self.start = 0
        self.records = Records()

    @property
    def total_length(self) -> int:
        """The number of batches before sharding."""
        return len(self.batch_sampler)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the inner batch sampler."""
        return self.batch_sampler.sampler

    @property
    def has_fixed_size(self) -> bool:
        """Whether all batches but the last have `batch_size` rows, so that positions can be computed."""
        return type(self.batch_sampler) is BatchSampler

    @property
    def has_exact_length(self) -> bool:
        """Whether the number of samples of a pass is known before it."""
        return self.has_fixed_size and gives_what_it_says(self.batch_sampler.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        length = len(self.batch_sampler)
        if self.split_batches:
            return length
        full, rest = divmod(length, self.num_processes)
        if rest == 0 or self.drop_last:
            return full
        return full + (self.even_batches or self.process_index < rest)

    def rounds(self, start: int = 0) -> Rounds | None:
        """Return the arithmetic of a pass that begins after `start` samples, None if sizes are not fixed."""
        if not self.has_fixed_size:
            return None
        try:
            total = len(self.batch_sampler.sampler)
        except TypeError:
            total = None
        return Rounds(
            total, self.batch_size, self.num_processes, self.split_batches, self.even_batches, self.drop_last, start
        )

    def __iter__(self) -> Iterator[list[int]]:
        return self.iterate(self.start)

    def iterate(self, start: int = 0, skip: int = 0) -> Iterator[list[int]]:
        """Yield the batches of a pass that begins after `start` global samples and `skip` of one's own batches."""
        self.records = Records()
        rounds = self.rounds()
        if rounds is None:
            return islice(self._recorded(start), skip, None)
        start += skip * rounds.unit
        batches, first = self._fixed_batches(start, rounds.unit)
        if not self.has_exact_length:
            batches = _counted(batches, self.records, start)
        if self.num_processes == 1 and start == 0:
            return batches
        return (piece.indices for piece in self._pieces(batches, first))

    @property
    def _width(self) -> int:
        """Inner batches of a round."""
        return 1 if self.split_batches else self.num_processes

    def _fixed_batches(self, start: int, unit: int) -> tuple[Iterator[list[int]], list[list[int]]]:
        opened = self.ordering.open
        if start == 0:
            return opened(self.batch_sampler, self.epoch), []
        if self.ordering.seed is None:
            head, rest = head_and_rest(self.batch_sampler.sampler, unit, start, self.ordering, self.epoch)
        else:
            # Opened in the same way as at the start of an epoch, or its seed would meet other draws.
            rest = chain.from_iterable(opened(self.batch_sampler, self.epoch))
            head = list(islice(rest, unit))
            rest = islice(rest, start - unit, None) if start >= unit else chain(head[start:], rest)
        return _batched(rest, self.batch_size, self.drop_last), list(_batched(iter(head), self.batch_size, False))

    def _recorded(self, start: int) -> Iterator[list[int]]:
        records = self.records
        batches, first = self._varying_batches(start)
        for piece in self._pieces(batches, first):
            records.add(piece)
            yield piece.indices

    def _varying_batches(self, start: int) -> tuple[Iterator[list[int]], list[list[int]]]:
        batches = self.ordering.open(self.batch_sampler, self.epoch)
        first: list[list[int]] = []
        passed = 0
        for batch in batches if start else ():
            if len(first) < self._width:
                first.append(batch)
            passed += len(batch)
            if passed > start:
                return chain([batch[start - passed :]], batches), first
            if passed == start:
                break
        return batches, first

    def _pieces(self, batches: Iterator[list[int]], first: list[list[int]]) -> Iterator[_Piece]:
        """Yield this process's part of each round; `first` are the epoch's first batches if they were passed over."""
        width, size = self._width, self.batch_size
        learns = not first
        group: list[list[int]] = []
        for batch in batches:
            if len(group) == width:  # its last batch was short, but it is not the end: hand it out as it is
                yield from self._whole(group)
                group = []
            group.append(batch)
            if learns and len(first) < width:
                first.append(batch)
            if len(group) == width and (size is None or len(batch) >= size):
                yield from self._whole(group)
                group = []
        if group:
            self.records.remainder = sum(map(len, group))
            yield from self._last(group, first)

    def _whole(self, group: list[list[int]]) -> Iterator[_Piece]:
        if not self.split_batches:
            own = group[self.process_index]
            yield _Piece(own, len(own), sum(map(len, group)))
        else:
            yield from self._cut(group[0], [group[0]])

    def _last(self, group: list[list[int]], first: list[list[int]]) -> Iterator[_Piece]:
        if self.num_processes == 1:
            if not self.drop_last:
                yield _Piece(group[0], len(group[0]), len(group[0]))
        elif self.drop_last:
            return
        elif self.split_batches or (self.even_batches and self.batch_size is not None):
            yield from self._cut(list(chain.from_iterable(group)), first)
        else:
            yield from self._whole_batches(group, first)

    def _whole_batches(self, group: list[list[int]], first: list[list[int]]) -> Iterator[_Piece]:
        """Hand out what is left batch by batch, completed with whole batches of the first round if even."""
        total, index = sum(map(len, group)), self.process_index
        if index < len(group):
            yield _Piece(group[index], len(group[index]), total)
        elif self.even_batches:
            yield _Piece(first[(index - len(group)) % len(first)], 0, total)

    def _cut(self, indices: list[int], first: list[list[int]]) -> Iterator[_Piece]:
        """Cut the samples of a round into equal parts, completed with the first samples of the epoch if even."""
        count = len(indices)
        rows = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        rows = max(rows, -(-count // self.num_processes))
        begin = self.process_index * rows
        real = clamp(count - begin, 0, rows)
        own = indices[begin : begin + rows]
        if self.even_batches and real < rows:
            pool = cycle(chain.from_iterable(first))
            own += islice(pool, begin + real - count, begin + rows - count)
        if own:
            yield _Piece(own, real, count)


def _counted(batches: Iterator[list[int]], records: Records, start: int) -> Iterator[list[int]]:
    """Pass the batches on, and note at their end how many samples the epoch had."""
    total = start
    for batch in batches:
        total += len(batch)
        yield batch
    records.total = total


def _batched(indices: Iterator[int], size: int, drop_last: bool) -> Iterator[list[int]]:
    while batch := list(islice(indices, size)):
        if drop_last and len(batch) < size:
            return
        yield batch


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first `skip_batches` batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size: int = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the inner batch sampler."""
        return self.batch_sampler.sampler

    @property
    def total_length(self) -> int:
        """The number of batches before skipping."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[list[int]]:
        inner, skip = self.batch_sampler, self.skip_batches
        if isinstance(inner, BatchSamplerShard):
            return inner.iterate(inner.start, skip)
        if type(inner) is BatchSampler and skip:
            _, rest = head_and_rest(inner.sampler, 0, skip * inner.batch_size, _FIXED_ORDER, 0)
            return _batched(rest, inner.batch_size, inner.drop_last)
        return islice(iter(inner), skip, None)


class IndexShard(Sampler[int]):
    """The indices that one process takes of a sampler whose every index stands for a whole batch."""

    def __init__(self, sampler: Any, num_processes: int, process_index: int, even_batches: bool = True) -> None:
        self.batch_sampler = BatchSamplerShard(_Singles(sampler), num_processes, process_index, False, even_batches)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[int]:
        return (indices[0] for indices in self.batch_sampler)


class _Singles:
    """A sampler's indices as batches of one."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in self.sampler)
