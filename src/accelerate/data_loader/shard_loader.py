"""The loader that each process reads for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from accelerate._base.helpers import warn_once
from accelerate.collectives.nested import place_batch
from accelerate.collectives.rng import synchronize_rng_states
from accelerate.data_loader.adapter import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.carrier import Counted
from accelerate.data_loader.iterables import IterableDatasetShard
from accelerate.data_loader.ledgers import (
    CountedLedger,
    GroupLedger,
    Ledger,
    RecordedLedger,
    RoundsLedger,
    SplitLedger,
    StreamsLedger,
    WindowLedger,
)
from accelerate.data_loader.parts import copy_loader, nested_samplers, outer_batch_sampler
from accelerate.data_loader.position import Position, Trail
from accelerate.data_loader.sharding import BatchSamplerShard, SkipBatchSampler
from accelerate.data_loader.windows import WindowBatchSampler, WindowDataset


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader whose batches belong to this process and are put on its device.

    `end_of_dataloader` is true while the last batch is processed; where the number of batches is not known beforehand,
    one is read ahead for that.

    Args:
        device: Where batches are put; where they are if None.
        rng_types: Random generators that take rank 0's state at the start of each pass.
        synchronized_generator: The generator meant by "generator" in `rng_types`.
        skip_batches: Batches left out at the start of each pass.
        use_stateful_dataloader: Whether torchdata's loader, which can save its state, reads the data.
        torch_device_mesh: Accepted for symmetry with the dispatcher.
        iteration: Number of the next epoch.
        kwargs: Arguments of `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: Iterable[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self._configure(device, rng_types, synchronized_generator, _drop_last=_drop_last, _non_blocking=_non_blocking)
        self.skip_batches = skip_batches
        self.iteration = iteration

    def _configure(
        self,
        device: torch.device | str | None,
        rng_types: Iterable[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        *,
        _drop_last: bool = False,
        _non_blocking: bool = False,
    ) -> None:
        self.device = torch.device(device) if isinstance(device, (str, int)) else device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self._states: deque[Any] | None = None
        self.skip_batches = 0
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = 0
        self.split_elsewhere = 0

    @classmethod
    def around(cls, base: Any, device: torch.device | str | None = None, **options: Any) -> DataLoaderShard:
        """Return a prepared loader around a loader as it is."""
        loader: DataLoaderShard = object.__new__(cls)
        stateful = options.pop("use_stateful_dataloader", False)
        loader._wrap(base, stateful)
        loader._configure(device, **options)
        return loader

    def __iter__(self) -> Iterator[Any]:
        if self.rng_types is not None and not self._goes_on:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        try:
            source, dropped = self._open()
            batches = islice(source, dropped, None) if dropped else iter(source)
            length = self._ledger.length if self._ledger is not None and self._states is None else None
            if length is None:
                yield from self._ahead(batches)
                return
            # The last of a known number of batches needs no look at the next. This loop is all that is done for a batch.
            device, non_blocking = self.device, self._non_blocking
            stays = _IN_PLACE if _is_only_device(device) else ()
            for number, batch in enumerate(batches, 1):
                self._taken = number
                if number == length:
                    self.end_of_dataloader = True
                yield batch if device is None or type(batch) in stays else place_batch(batch, device, non_blocking)
            if length:
                self._complete()
            else:
                self._end_empty()
        finally:
            self.end()

    def _ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand out batches of unknown number, reading one ahead to know the last one."""
        device, non_blocking = self.device, self._non_blocking
        is_special = self._states is not None or isinstance(self._ledger, (GroupLedger, WindowLedger))
        batch = next(batches, _NOTHING)
        if batch is _NOTHING:
            self._end_empty()
            return
        for upcoming in batches:
            self._taken += 1
            if is_special:
                batch = self._unpack(batch)
            if device is not None:
                batch = place_batch(batch, device, non_blocking)
            yield batch
            batch = upcoming
        self._taken += 1
        self.end_of_dataloader = True
        if is_special:
            batch = self._unpack(batch)
        self._settle_remainder()
        if device is not None:
            batch = place_batch(batch, device, non_blocking)
        yield batch
        self._complete()

    def _open(self) -> tuple[Any, int]:
        """Begin a pass: return what to read, and how many of its first batches are dropped."""
        start, trail = self._take_start()
        base, dropped = self.base_dataloader, self.skip_batches
        is_placed = self._place_dataset(trail)
        ledger: Ledger
        sampler = _sharded_sampler(base)
        dataset = getattr(base, "dataset", None)
        skipped = dropped + _skipped_by_sampler(base) + self._resumed_batches
        if sampler is not None:
            sampler.start = start
            ledger = _sampler_ledger(sampler, start, skipped)
        elif isinstance(dataset, WindowDataset):
            dataset.start, dataset.is_placed = start, is_placed
            ledger = WindowLedger(dataset.windows.starting_at(start), dataset.process_index, skipped)
        elif isinstance(dataset, IterableDatasetShard) and not self.split_elsewhere:
            rounds = _rounds_to_drop(base, start, trail, dataset.group_size)
            dropped += rounds
            passed = 0 if rounds else start
            ledger = _group_ledger(base, dataset, passed, skipped, trail, self._resumed_samples)
            dataset.start = 0 if is_placed else passed
            dataset.start_unit, dataset.start_streams = trail.unit, trail.streams if passed else ()
            if start and base.persistent_workers:
                base = copy_loader(base)  # workers that run already would not hear of the start
        else:
            base, ledger, more = self._open_as_it_is(start, skipped, is_placed)
            dropped += more
        self._ledger = ledger
        self._forward_epoch(self.iteration)
        self.begin()
        if (remainder := ledger.remainder) is not None:
            self.remainder = -1 if self._drop_last or isinstance(ledger, (GroupLedger, RecordedLedger)) else remainder
        saves = self._saves_state()
        self._states = None if saves is None else deque()
        source = self._start_reading(base)
        if self._states is not None and saves is not None:
            source = _capturing(source, saves, self._states)
        if dropped and isinstance(ledger, StreamsLedger):
            return _passing_over(source, dropped, ledger), 0
        return source, dropped

    def _open_as_it_is(self, start: int, skipped: int, is_placed: bool) -> tuple[Any, Ledger, int]:
        base = self.base_dataloader
        sampler = outer_batch_sampler(base)
        batch_size = getattr(sampler, "batch_size", None) or getattr(base, "batch_size", None) or 1
        unit = batch_size * max(self.split_elsewhere, 1)
        ledger = (SplitLedger if self.split_elsewhere else Ledger)(unit, start, skipped)
        if start == 0 or is_placed:
            return base, ledger, 0
        dropped, rest = divmod(start, unit)
        dataset = getattr(base, "dataset", None)
        if isinstance(dataset, IterableDataset) and base.num_workers <= 1 and not self.split_elsewhere:
            return copy_loader(base, dataset=_Offset(dataset, start)), ledger, 0
        if dataset is not None and sampler is not None and not isinstance(dataset, IterableDataset):
            name = "sampler" if isinstance(base.sampler, BatchSampler) else "batch_sampler"
            return copy_loader(base, **{name: SkipBatchSampler(sampler, dropped)}), ledger, 0
        return base, ledger, dropped + (rest > 0)

    def _unpack(self, batch: Any) -> Any:
        """Take what the batch at hand brought along, or what was put aside for it."""
        if self._states:
            state = self._states.popleft()
            if self._has_stateful_base:
                self.dl_state_dict = {**state, "_iterator_finished": True} if self.end_of_dataloader else state
            else:
                self._dataset_state = state
        if type(batch) is not Counted:
            return batch
        if self._ledger is not None:
            self._ledger.note(self._taken, batch.note)
        return batch.batch

    def _end_empty(self) -> None:
        """Count a pass without a batch if it was the rest of an epoch; an empty loader stays where it is."""
        if self._ledger is not None and self._ledger.start:
            self._complete()
        self._finished = True

    def _settle_remainder(self) -> None:
        """Set the remainder that is only known at the last batch."""
        ledger = self._ledger
        if isinstance(ledger, (RecordedLedger, CountedLedger)) and not self._drop_last and ledger.remainder is not None:
            self.remainder = ledger.remainder
        elif isinstance(ledger, GroupLedger) and not self._drop_last and ledger.remainder is not None:
            is_unknown = ledger.ready_batches
            self.remainder = -1 if is_unknown else (ledger.real if ledger.is_short(self._taken) else 0)

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int:
        """Samples of a step over all processes."""
        dataset = getattr(self.base_dataloader, "dataset", None)
        if isinstance(dataset, IterableDatasetShard):
            return dataset.group_size
        if isinstance(dataset, WindowDataset):
            return dataset.windows.size
        sampler = _sharded_sampler(self.base_dataloader) or outer_batch_sampler(self.base_dataloader)
        if isinstance(sampler, WindowBatchSampler):
            return sampler.windows.size
        size: int = sampler.batch_size if sampler is not None else self.base_dataloader.batch_size
        if getattr(sampler, "split_batches", False):
            return size
        return size * (self.split_elsewhere or getattr(sampler, "num_processes", 1))

    @property
    def dataset(self) -> Any:
        """What is read; for one process the dataset that its user gave."""
        dataset = self.base_dataloader.dataset
        is_whole = isinstance(dataset, IterableDatasetShard) and not dataset.completes
        return dataset.dataset if is_whole else dataset

    @property
    def _layout(self) -> list[int]:
        base = self.base_dataloader
        view = _sharded_sampler(base) or getattr(base, "dataset", None)
        parts = self.split_elsewhere or getattr(view, "num_processes", 1)
        with suppress(AttributeError, TypeError):
            return [self.total_batch_size, parts, *super()._layout, self._num_readers]
        return [parts, *super()._layout, self._num_readers]

    def _say_if_divided_otherwise(self, position: Position, trail: Trail) -> None:
        if not (self.split_elsewhere and position.samples and trail.unit):
            return
        with suppress(AttributeError, TypeError):
            if trail.unit != self.total_batch_size:
                warn_once(
                    f"This loader stopped inside an epoch after steps of {trail.unit} samples and goes on with steps of "
                    f"{self.total_batch_size}, and its data was divided among the processes before it came to prepare. Which "
                    "samples were seen is then not known: some may repeat or be missed until the epoch ends. Let prepare "
                    "divide the data, or go on with the number of processes and the batch size of before."
                )

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset over all processes."""
        dataset = self.base_dataloader.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset = dataset.dataset
        length: int = dataset.total_length if hasattr(dataset, "total_length") else len(dataset)
        return length


class _Offset(IterableDataset[Any]):
    """An iterable dataset without its first elements."""

    def __init__(self, dataset: Iterable[Any], start: int) -> None:
        self.dataset = dataset
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.start, None)


_NOTHING: Any = object()
# What is made of tensors; another object may want its own `to` to be called.
_IN_PLACE = frozenset({dict, list, tuple, torch.Tensor})


def _is_only_device(device: torch.device | None) -> bool:
    """Return whether there is no other place for a tensor in this process, so that none has to be moved."""
    return device is not None and device.type == "cpu" and not torch.accelerator.is_available()


def _sharded_sampler(loader: Any) -> BatchSamplerShard | WindowBatchSampler | None:
    for part in nested_samplers(loader):
        if isinstance(part, (BatchSamplerShard, WindowBatchSampler)):
            return part
    return None


def _skipped_by_sampler(loader: Any) -> int:
    return sum(part.skip_batches for part in nested_samplers(loader) if isinstance(part, SkipBatchSampler))


def _sampler_ledger(sampler: BatchSamplerShard | WindowBatchSampler, start: int, skipped: int) -> Ledger:
    if isinstance(sampler, WindowBatchSampler):
        counted = None if sampler.has_exact_length else sampler
        return WindowLedger(sampler.plan(start), sampler.process_index, skipped, counted)
    rounds = sampler.rounds(start)
    if rounds is None:
        return RecordedLedger(sampler, start, skipped)
    if sampler.has_exact_length:
        return RoundsLedger(rounds, sampler.process_index, skipped)
    return CountedLedger(sampler, rounds, skipped)


def _rounds_to_drop(loader: Any, start: int, trail: Trail, group_size: int) -> int:
    """Return how many whole batches are drawn and dropped, 0 to pass over elements: only so do workers keep turns."""
    if start == 0 or loader.num_workers <= 1 or trail.unit not in (0, group_size):
        return 0
    if trail.streams:
        return 0 if trail.rounds is None or len(trail.streams) != loader.num_workers else trail.rounds
    return 0 if start % group_size else start // group_size


def _group_ledger(
    loader: Any, shard: IterableDatasetShard, start: int, skipped: int, trail: Trail, resumed: int
) -> GroupLedger:
    """Return the account of a pass that begins after `start` samples, or `resumed` ones that torchdata passes over."""
    ready, workers = loader.batch_size is None, loader.num_workers
    if workers <= 1:
        return GroupLedger(shard, start, skipped, ready_batches=ready)
    is_known = len(trail.streams) == workers and (start or resumed)
    streams = list(trail.streams) if is_known else [0] * workers
    rounds = trail.rounds if resumed else 0
    return StreamsLedger(shard, start or resumed, streams, None if start else rounds, ready_batches=ready)


def _capturing(source: Any, saves: Callable[[], Any], states: deque[Any]) -> Iterator[Any]:
    """Take the state after each batch, before the next one is read ahead."""
    for batch in source:
        states.append(saves())
        yield batch


def _passing_over(source: Any, count: int, ledger: StreamsLedger) -> Iterator[Any]:
    """Draw and drop batches, but note what they were."""
    batches = iter(source)
    for batch in islice(batches, count):
        ledger.note(0, batch.note)
    yield from batches
