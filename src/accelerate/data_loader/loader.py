"""The loader that each process reads for itself, and loaders that leave out the first batches of others."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate._base.errors import ConfigurationError
from accelerate.collectives.nested import place_batch
from accelerate.collectives.rng import synchronize_rng_states
from accelerate.data_loader.adapter import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.draws import nested_samplers
from accelerate.data_loader.file_shards import FileShard, in_step
from accelerate.data_loader.iterables import AnnotatedBatch, IterableDatasetShard, LeftInFiles, Offset
from accelerate.data_loader.order import EpochOrder, length_of
from accelerate.data_loader.plan import Observations, PlainPlan
from accelerate.data_loader.progress import DataSource, EpochProgress, OpenedPass, ResumePoint
from accelerate.data_loader.samplers import (
    SkipBatchSampler,
    copy_loader,
    copy_with,
    copy_with_batch_sampler,
    known_size,
    outer_batch_sampler,
    skipped_batches,
    whole_dataset,
    without_skips,
)

_NOTHING: Any = object()
# What is made of tensors; another object may want its own `to` to be called.
_MADE_OF_TENSORS = frozenset({dict, list, tuple, torch.Tensor})


class PlainSource(DataSource):
    """A loader that is read as it is: for one process, or divided by a sampler or dataset that is not ours.

    Args:
        divided_by: Among how many processes others have divided the data, 0 if they have not.
    """

    def __init__(self, loader: Any, divided_by: int = 0) -> None:
        self.loader = loader
        self.divided_by = divided_by
        self.sampler = outer_batch_sampler(loader)
        self.num_processes = divided_by or getattr(getattr(loader, "dataset", None), "num_processes", 1)
        self.observed = Observations()
        self.order = EpochOrder()

    @property
    def total_batch_size(self) -> int:
        """Samples of a step over all processes."""
        size = known_size(self.loader.batch_size if self.sampler is None else self.sampler.batch_size)
        if getattr(self.sampler, "split_batches", False):
            return size
        return size * (self.divided_by or getattr(self.sampler, "num_processes", 1))

    def open_pass(self, loader: Any, point: ResumePoint, *, dataset_is_placed: bool) -> OpenedPass:
        """Begin a pass; samples are passed over as indices or elements where that is possible, else as batches."""
        batch_size = getattr(self.sampler, "batch_size", None) or getattr(loader, "batch_size", None) or 1
        unit = batch_size * max(self.divided_by, 1)
        plan = PlainPlan(unit, point.start, -1 if self.divided_by else None, self._num_batches(loader, point.start))
        if point.start == 0 or dataset_is_placed:
            return OpenedPass(plan, loader)
        dataset: Any = getattr(loader, "dataset", None)
        is_iterable = isinstance(dataset, IterableDataset)
        if is_iterable and loader.num_workers <= 1 and not self.divided_by:
            whole = LeftInFiles(dataset, point.files) if point.files else dataset
            return OpenedPass(plan, copy_loader(loader, dataset=Offset(whole, point.start - sum(point.files))))
        dropped, rest = divmod(point.start, unit)
        if dataset is not None and self.sampler is not None and not is_iterable:
            whole, _ = without_skips(self.sampler)
            return OpenedPass(plan, copy_with_batch_sampler(loader, SkipBatchSampler(whole, dropped)))
        return OpenedPass(plan, loader, dropped + (rest > 0))

    def _num_batches(self, loader: Any, start: int) -> int | None:
        """Return how many batches are left of an iterable dataset that one process reads, None if nobody says."""
        dataset: Any = getattr(loader, "dataset", None)
        total = length_of(dataset) if isinstance(dataset, IterableDataset) and self.believes_length else None
        size = getattr(loader, "batch_size", None)
        if total is None or size is None or self.divided_by or loader.num_workers > 1:
            return None
        left = max(total - start, 0)
        count: int = left // size if loader.drop_last else -(-left // size)
        return count


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader whose batches belong to this process and are put on its device.

    `end_of_dataloader` is true while the last batch is processed; where the number of batches is not known in advance,
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
        self.device = torch.device(device) if isinstance(device, (str, int)) else device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration

    def __iter__(self) -> Iterator[Any]:
        self._passes_at_iter = self.gradient_state.passes
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self.rng_types and not self._goes_on:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        try:
            saves_state = self._saves_state()
            source, progress, batches = self._open(saves_state)
            if isinstance(source, FileShard):
                yield from self._read_in_step(source, progress, batches)
                return
            length = progress.num_batches
            if length is None:
                yield from self._read_ahead(source, progress, batches)
                return
            if saves_state is not None or progress.plan.is_observed:
                yield from self._read_counted(source, progress, batches, length)
                return
            # The last of a known number of batches needs no look at the next. This loop is all that is done for a batch.
            device, non_blocking = self.device, self._non_blocking
            stays = _MADE_OF_TENSORS if _is_only_device(device) else ()
            number = 0
            for number, batch in enumerate(batches, 1):
                progress.taken = number
                if number >= length:
                    if number > length:
                        yield from self._read_beyond(batch, source, progress, batches)
                        return
                    self.end_of_dataloader = True
                    self._take_remainder(progress)
                yield batch if device is None or type(batch) in stays else place_batch(batch, device, non_blocking)
            self._end_counted(progress, number, length)
        finally:
            self.end()

    def _read_counted(
        self, source: DataSource, progress: EpochProgress, batches: Iterator[Any], length: int
    ) -> Iterator[Any]:
        """Hand out a known number of batches that say their sizes or states when they come."""
        number = 0
        for number, batch in enumerate(batches, 1):
            if number == 1:
                progress.observe(source.observed)
            if number > length:
                yield from self._read_beyond(batch, source, progress, batches)
                return
            self.end_of_dataloader = number == length
            batch = self._hand_out(batch, progress)
            if self.end_of_dataloader:
                self._take_remainder(progress)
            yield batch
        self._end_counted(progress, number, length)

    def _end_counted(self, progress: EpochProgress, number: int, length: int) -> None:
        """End a pass of a known number of batches."""
        if number < length:
            self._warn_of_length(number, length)
        if number:
            self._complete()
        else:
            self._end_empty(progress)

    def _read_beyond(
        self, batch: Any, source: DataSource, progress: EpochProgress, batches: Iterator[Any]
    ) -> Iterator[Any]:
        """Hand out what comes after the number of batches that was said to come."""
        length = progress.num_batches or 0
        self._warn_of_length(f"more than {length}", length)
        self.end_of_dataloader = False
        progress.taken = length
        progress.go_beyond()
        yield from self._read_ahead(source, progress, chain([batch], batches))

    def _open(self, saves_state: Callable[[], Any] | None) -> tuple[DataSource, EpochProgress, Iterator[Any]]:
        """Begin a pass: return where its data comes from, its count, and its batches, with their states if any."""
        base = self.base_dataloader
        samplers = nested_samplers(base)
        point = self._begin_pass(samplers)
        source = self._source_among(samplers)
        source.believes_length = not self._misstates_length
        is_placed = self._place_dataset(point)
        plan, reader, dropped = source.open_pass(base, point, dataset_is_placed=is_placed)
        skipped = point.batches
        if not point.start:  # a position counts what is skipped
            dropped += self.skip_batches
            skipped += self.skip_batches + skipped_batches(samplers)
        progress = EpochProgress(plan, skipped, point.batches, source.order)
        progress.files = point.files
        self._start_progress(progress, point)
        self._forward_epoch(samplers)
        self.begin()
        batches = self._start_reading(reader)
        progress.observed = source.observed
        if saves_state is not None:
            batches = _with_states(batches, saves_state)
        if dropped:
            is_counted = plan.has_notes
            batches = _pass_over(batches, dropped, progress) if is_counted else islice(batches, dropped, None)
        return source, progress, batches

    def _expected_remainder(self) -> int:
        remainder = None if self.epoch_progress is None else self.epoch_progress.plan.remainder
        if remainder is None:
            return super()._expected_remainder()
        return -1 if self._drop_last else remainder

    @property
    def _source(self) -> DataSource:
        """What the data comes from; it is looked up anew, because users exchange samplers."""
        return self._source_among(nested_samplers(self.base_dataloader))

    def _source_among(self, samplers: list[Any]) -> DataSource:
        for part in samplers:
            if isinstance(part, DataSource):
                return part
        base = self.base_dataloader
        dataset = getattr(base, "dataset", None)
        if isinstance(dataset, DataSource) and not self.split_elsewhere:
            return dataset
        return PlainSource(base, self.split_elsewhere)

    def _read_ahead(self, source: DataSource, progress: EpochProgress, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand out batches of unknown number, reading one ahead to know the last one."""
        batch = next(batches, _NOTHING)
        if batch is _NOTHING:
            self._end_empty(progress)
            return
        if not progress.taken:
            progress.observe(source.observed)
        for upcoming in batches:
            yield self._hand_out(batch, progress)
            batch = upcoming
        self.end_of_dataloader = True
        batch = self._hand_out(batch, progress)
        self._take_remainder(progress)
        yield batch
        self._complete()

    def _take_remainder(self, progress: EpochProgress) -> None:
        if progress.size is None and progress.observed.total is None:
            return  # reading has shown nothing that was not known when the pass began
        remainder = None if self._drop_last else progress.remainder
        if remainder is not None:
            self.remainder = remainder

    def _read_in_step(self, source: FileShard, progress: EpochProgress, batches: Iterator[Any]) -> Iterator[Any]:
        """Hand out batches until no process has any."""
        progress.files = source.files
        for batch, rows, self.end_of_dataloader in in_step(batches, source.batch_size):
            if not source.is_common:
                progress.files = tuple(map(operator.add, progress.files, rows))
            batch = self._hand_out(batch, progress)
            if self.end_of_dataloader:
                self._take_remainder(progress)
            yield batch
        if progress.taken:
            self._complete()
        else:
            self._end_empty(progress)

    def _hand_out(self, batch: Any, progress: EpochProgress) -> Any:
        """Count a batch, take what it brought along, and put it on the device."""
        if type(batch) is AnnotatedBatch:
            progress.hand_out(batch.note)
            if batch.state is not None:
                self._keep_state(batch.state, is_last=self.end_of_dataloader)
            batch = batch.batch
        else:
            progress.hand_out()
        return batch if self.device is None else place_batch(batch, self.device, self._non_blocking)

    def _end_empty(self, progress: EpochProgress) -> None:
        """Count a pass without a batch if it was the rest of an epoch; an empty loader stays where it is."""
        start = progress.plan.start or self._resumed_at
        if start:
            self._end_empty_rest(start)
        self._finish()

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self.skip_batches, 0)

    @property
    def total_batch_size(self) -> int:
        """Samples of a step over all processes."""
        return self._source.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset over all processes."""
        dataset = whole_dataset(self.base_dataloader)
        length: int = dataset.total_length if hasattr(dataset, "total_length") else len(dataset)
        return length

    @property
    def dataset(self) -> Any:
        """What is read; for one process the dataset that its user gave."""
        dataset = self.base_dataloader.dataset
        is_whole = isinstance(dataset, IterableDatasetShard) and not dataset.completes
        return dataset.dataset if is_whole else dataset

    @property
    def _layout(self) -> list[int]:
        source = self._source
        with suppress(AttributeError, TypeError):
            return [source.total_batch_size, source.num_processes, *super()._layout, self._num_readers]
        return [source.num_processes, *super()._layout, self._num_readers]


@functools.cache
def _is_only_device(device: torch.device | None) -> bool:
    """Return whether there is no other place for a tensor in this process, so that none has to be moved."""
    return device is not None and device.type == "cpu" and not torch.accelerator.is_available()


def _with_states(batches: Iterator[Any], saves: Callable[[], Any]) -> Iterator[AnnotatedBatch]:
    """Take the state after each batch, before the next one is read ahead."""
    for batch in batches:
        annotated = batch if type(batch) is AnnotatedBatch else AnnotatedBatch(batch)
        annotated.state = saves()
        yield annotated


def _pass_over(batches: Iterator[Any], count: int, progress: EpochProgress) -> Iterator[Any]:
    """Draw and drop the first batches, but count them."""
    for batch in islice(batches, count):
        progress.pass_over(batch.note if type(batch) is AnnotatedBatch else None)
    yield from batches


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A plain loader that draws and drops its first `skip_batches` batches, for data that cannot be indexed."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches

    @property
    def total_batch_size(self) -> int:
        """Samples of a step."""
        return known_size(self.base_dataloader.batch_size)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.base_dataloader.dataset)

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            yield from islice(self.base_dataloader, self.skip_batches, None)
        finally:
            self.end()


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader of the same kind, with everything kept, that starts `num_batches` batches in.

    It is meant for the rest of one epoch: iterated again, it skips again. Once it was read to its end, the given
    loader goes on with the next epoch. If that loader's position was restored, `num_batches` counts from the start of
    the epoch, not from the position: the result starts at batch `num_batches`.

    A loader that is not prepared yet may be skipped too: `prepare` then divides the rest of each epoch.

    Raises:
        ConfigurationError: (a ValueError) if `num_batches` is negative.
    """
    if num_batches < 0:
        raise ConfigurationError(
            f"skip_first_batches was given num_batches={num_batches!r}: there is nothing before the first batch; pass 0 "
            "or more"
        )
    if isinstance(dataloader, SkipDataLoader):
        return SkipDataLoader(None, dataloader.skip_batches + num_batches, _base_dataloader=dataloader.base_dataloader)
    if not isinstance(dataloader, DataLoaderAdapter):
        skipping = _skip_by_sampler(dataloader, num_batches) if isinstance(dataloader, DataLoader) else None
        return SkipDataLoader(None, num_batches, _base_dataloader=dataloader) if skipping is None else skipping
    restored = dataloader._resume
    changes: dict[str, Any] = {
        "skipped_from": dataloader,
        "epoch_progress": None,
        "_has_drawn_seed": False,
        "_skips_to_restored": dataloader._goes_on and num_batches > 0,
        "_resume": None if restored is None else ResumePoint(restored.epoch, order=restored.order),
    }
    # The given loader no longer goes to a restored position by itself.
    dataloader._forget_resume()
    skipping = _skip_by_sampler(dataloader.base_dataloader, num_batches * dataloader._batches_per_step)
    if skipping is not None:
        changes["base_dataloader"] = skipping
    else:
        changes["skip_batches"] = dataloader.skip_batches + num_batches
    return copy_with(dataloader, **changes)


def _skip_by_sampler(loader: Any, num_batches: int) -> Any | None:
    """Return a copy of the loader that passes over indices instead of samples, None if there are none."""
    dataset, batch_sampler = getattr(loader, "dataset", None), outer_batch_sampler(loader)
    if dataset is None or isinstance(dataset, IterableDataset) or batch_sampler is None:
        return None
    whole, skipped = without_skips(batch_sampler)
    return copy_with_batch_sampler(loader, SkipBatchSampler(whole, skipped + num_batches))
