"""What all prepared loaders have in common: composition around a loader, the clock's flags, position and state."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate._base.imports import require
from accelerate.data_loader.draws import RandomStream, RandomStreams, nested_samplers, own_streams
from accelerate.data_loader.iterables import is_hf_dataset, saves_its_state
from accelerate.data_loader.order import EpochSeed, SeedableRandomSampler
from accelerate.data_loader.plan import UNKNOWN_SHARE, MicroBatch, Share
from accelerate.data_loader.progress import (
    DataSource,
    EpochProgress,
    EpochSource,
    Position,
    ResumePoint,
    check_loader_state,
)
from accelerate.data_loader.samplers import epoch_source, get_sampler, set_sampler, whole_dataset
from accelerate.runtime.gradient_clock import GradientState, PassCount
from accelerate.runtime.loader_workers import worker_shield

logger = logging.getLogger(__name__)

_PYTORCH_DATALOADER_KWARGS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name not in ("self", "dataset")
}
"""The arguments of `DataLoader` and their defaults."""

_OWN_STATE = "_accelerate"


def stateful_class() -> type[Any]:
    """Return torchdata's loader that can save its state.

    Raises:
        MissingPackageError: (an ImportError) if torchdata is not installed.
    """
    require("torchdata", why="use_stateful_dataloader=True saves the state of a loader with it")
    from torchdata.stateful_dataloader import StatefulDataLoader

    found: type[Any] = StatefulDataLoader
    return found


def as_stateful(loader: Any) -> Any:
    """Return torchdata's stateful loader with the options of `loader`."""
    cls = stateful_class()
    if isinstance(loader, cls):
        return loader
    left_out = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
    if loader.num_workers == 0:
        left_out |= {"prefetch_factor", "persistent_workers", "timeout"}
    accepted = _PYTORCH_DATALOADER_KWARGS.keys() & inspect.signature(cls.__init__).parameters.keys()
    stateful = cls(loader.dataset, **{name: getattr(loader, name) for name in accepted - left_out})
    for name in ("batch_sampler", "sampler", "batch_size", "drop_last"):
        stateful.__dict__[name] = loader.__dict__[name]
    return stateful


def _iterate_with_spare_seed(loader: Any) -> Iterator[Any]:
    """Start the workers of a loader with a seed that leaves no trace in the generator it would be drawn from."""
    own = loader.generator
    spare = torch.Generator()
    spare.set_state((torch.default_generator if own is None else own).get_state())
    loader.generator = spare
    try:
        return iter(loader)
    finally:
        loader.generator = own


class DataLoaderStateMixin:
    """The flags that the gradient clock reads while a loader is iterated."""

    end_of_dataloader: bool = False
    remainder: int = -1
    _drop_last: bool = False
    # The passes over other loaders that were under way when the last iterator was created.
    _passes_at_iter: list[PassCount] | None = None

    @property
    def gradient_state(self) -> GradientState:
        """The gradient clock that reads the flags."""
        return GradientState()

    def reset(self) -> None:
        """Put the flags back to what they are before a pass."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start a pass: reset the flags and make this the clock's active loader."""
        self.reset()
        self.remainder = self._expected_remainder()
        loader: Any = self
        GradientState()._add_dataloader(loader, self._passes_at_iter)
        self._passes_at_iter = None

    def _expected_remainder(self) -> int:
        """Return the real samples of an incomplete last batch by the lengths of loader and dataset, -1 if unknown."""
        loader: Any = self
        # Datasets without a length, loaders without a batch size: the remainder stays unknown.
        with suppress(Exception):
            if not self._drop_last:
                return int(loader.total_dataset_length % loader.total_batch_size)
        return -1

    def end(self) -> None:
        """End a pass: the clock forgets this loader."""
        loader: Any = self
        GradientState()._remove_dataloader(loader)


class DataLoaderAdapter:
    """A loader around another one (`base_dataloader`), which answers for everything that is not overridden.

    It passes for an instance of the inner loader's class.

    Args:
        use_stateful_dataloader: Whether the inner loader is torchdata's, which can save its state.
        kwargs: Arguments of `torch.utils.data.DataLoader`.

    Raises:
        MissingPackageError: (an ImportError) if torchdata is asked for and not installed.
    """

    base_dataloader: Any
    use_stateful_dataloader: bool
    dl_state_dict: dict[str, Any] | None
    """The state of torchdata's loader behind the batch at hand."""
    iteration: int = 0
    """Number of the epoch at hand, of the next one outside of loops."""
    epoch_progress: EpochProgress | None
    """The count of the pass at hand, of the last one outside of loops; None before the first."""
    trains: bool = False
    """Whether an optimizer has stepped inside a loop over this loader."""
    skipped_from: DataLoaderAdapter | None
    """The loader whose first batches this one leaves out."""
    skip_batches: int = 0
    """Steps at the start of each epoch that every pass leaves out."""
    left_out: int = 0
    """Batches at the start of each epoch that no pass reads."""
    split_elsewhere: int = 0
    """Among how many processes the data was divided before it came to prepare, 0 if it was not."""
    differs_between_ranks: bool = False
    """Whether the state of this loader is another one on each rank."""
    _batches_per_step: int = 1

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        base = kwargs.pop("_base_dataloader", None)  # a loader as it is, instead of a dataset
        if base is None:
            cls = stateful_class() if use_stateful_dataloader else DataLoader
            base = cls(dataset, batch_sampler=batch_sampler, **kwargs)
        self.base_dataloader = base
        self.use_stateful_dataloader = use_stateful_dataloader
        self.dl_state_dict = None
        self.epoch_progress = None
        self.skipped_from = None
        # Reads the rest of this loader's epoch, from the start of its pass until the end.
        self._continued_by: DataLoaderAdapter | None = None
        # Where the next pass starts, if not at the beginning of its epoch.
        self._resume: ResumePoint | None = None
        self._skips_to_restored = False
        self._continues_epoch = False
        self._continues_saved = False
        self._resumed_at = 0
        self._dataset_was_placed = False
        self._seeds: list[EpochSeed] = []
        self._reshuffles_after_break = False
        self._misstates_length = False
        # What gives the samples of the current epoch, or of the one to resume.
        self._epoch_source: EpochSource | None = None
        # The number that samplers were told last; they begin with 0.
        self._told_epoch = 0
        # Whether the position is known to torchdata's loader alone, from a checkpoint of release 1.15.
        self._is_placed_by_torchdata = False
        # Whether worker processes that live as long as the loader have got their seed.
        self._has_drawn_seed = False
        # The generators of loader and samplers, looked up at each pass, because users exchange them.
        self._generators: dict[str, RandomStream] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """The inner loader's class, so that this is an instance of it as well as of its own."""
        base = self.__dict__.get("base_dataloader")
        return type(self) if base is None else type(base)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "base_dataloader" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (type(self),), {**self.__dict__, "_continued_by": None, "_generators": None}

    def seed_with(self, seeds: list[EpochSeed], *, reshuffles_after_break: bool) -> None:
        """Take the seeds that fix the order of each epoch, to save and restore them, and note what it comes from.

        Args:
            reshuffles_after_break: Whether a pass that was left early is followed by another order.
        """
        self._seeds = seeds
        self._epoch_source = epoch_source(self.base_dataloader, self.split_elsewhere)
        self._reshuffles_after_break = bool(seeds) and reshuffles_after_break

    def get_sampler(self) -> Any:
        """Return the sampler that gives the order."""
        return get_sampler(self.base_dataloader)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that gives the order."""
        set_sampler(self.base_dataloader, sampler)

    @property
    def share(self) -> Share:
        """Rows of this process's batch, padding included, and how many of the leading ones are real samples."""
        return UNKNOWN_SHARE if self.epoch_progress is None else self.epoch_progress.share

    @property
    def microbatch(self) -> MicroBatch | None:
        """The batch's part in its global batch of `global_batch_size` samples, None without one."""
        return None if self.epoch_progress is None else self.epoch_progress.micro_batch

    @property
    def position(self) -> Position:
        """Where the loader stands: the epoch, and the global samples of it that were handed out."""
        if self._continued_by is not None:
            return self._continued_by.position
        if self._resume is not None:
            return self._resume.position
        progress = self.epoch_progress
        if progress is None or progress.is_finished:
            return Position(self.iteration, 0)
        if getattr(self, "end_of_dataloader", False):
            return Position(self.iteration + 1, 0)
        return Position(self.iteration, progress.consumed)

    def seek(self, position: Position, unit: int = 0) -> None:
        """Make the next iteration start at a position, on whatever number of processes it was reached.

        The order is that of the last pass if that was over the same epoch, unless it depends on seed and epoch alone.

        Args:
            unit: Global samples of a step where the position was reached; needed for iterable datasets that several
                worker processes read, and only if it has changed.

        Raises:
            ConfigurationError: (a ValueError) if epoch or samples are negative.
        """
        if position.epoch < 0 or position.samples < 0:
            raise ConfigurationError(
                f"seek was given {position!r}: a position cannot be negative; pass one that `loader.position` returned"
            )
        last = self.epoch_progress
        order = last.recorded_order if last is not None and last.epoch == position.epoch else None
        self._go_to(ResumePoint(position.epoch, position.samples, unit, order=order))

    def _go_to(self, point: ResumePoint) -> None:
        self._forget_resume()
        self.iteration = point.epoch
        self._resume = point
        self._finish()

    def _forget_resume(self) -> None:
        """Let the next iteration start at the beginning of its epoch, whatever was restored."""
        self._continued_by = None
        goes_there = self._resume is not None and self._resume.is_reached_by_torchdata
        if goes_there and hasattr(self.base_dataloader, "next_iter_state"):
            self.base_dataloader.next_iter_state = None  # torchdata's only way back
        self._resume = None

    def _finish(self) -> None:
        if self.epoch_progress is not None:
            self.epoch_progress.is_finished = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, and tell samplers and dataset."""
        if self._resume is not None and self._resume.epoch != epoch:
            self._forget_resume()
        if self._continued_by is not None and self._continued_by.iteration != epoch:
            self._continued_by = None
        self.iteration = epoch
        if not any(loader is self for loader in GradientState().dataloader_references):
            self._finish()
        self._forward_epoch(nested_samplers(self.base_dataloader))

    def _forward_epoch(self, samplers: list[Any]) -> None:
        for part in (*samplers, getattr(self.base_dataloader, "dataset", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(self.iteration)
        # A loader that skips batches has the samplers of the loader it was made from.
        loader: DataLoaderAdapter | None = self
        while loader is not None:
            loader._told_epoch = self.iteration
            loader = loader.skipped_from

    def _chosen_epoch(self, samplers: list[Any]) -> int:
        """Return the number of the next epoch: the next, unless the user has told a sampler of theirs another one."""
        for part in samplers:
            if not hasattr(part, "set_epoch") or isinstance(part, (DataSource, SeedableRandomSampler)):
                continue
            epoch = getattr(part, "epoch", None)
            if isinstance(epoch, int) and epoch != self._told_epoch:
                return epoch
        return self.iteration

    @property
    def _goes_on(self) -> bool:
        """Whether the next pass is the rest of one that was stopped inside its epoch."""
        return self._skips_to_restored or (self._resume is not None and self._resume.samples > 0)

    def _begin_pass(self, samplers: list[Any]) -> ResumePoint:
        """Return where a pass that begins now starts."""
        point, last = self._resume, self.epoch_progress
        self._continues_epoch = self._goes_on
        self._continues_saved = point is not None and point.is_saved
        self._resumed_at = 0 if point is None else point.samples
        if point is not None:
            self.iteration = point.epoch
        elif self._reshuffles_after_break and last is not None and not last.is_finished:
            # As a plain loader does, shuffle anew although the last pass was left early.
            self.iteration += 1
        else:
            self.iteration = self._chosen_epoch(samplers)
        self._resume = self._continued_by = None
        of_user = [part for part in samplers if not isinstance(part, DataSource)]
        self._generators = own_streams(self.base_dataloader, of_user)
        if self.skipped_from is not None:
            self.skipped_from._continued_by = self
        return point or ResumePoint(self.iteration)

    def _start_progress(self, progress: EpochProgress, point: ResumePoint) -> None:
        self.epoch_progress = progress
        self._epoch_source = epoch_source(self.base_dataloader, self.split_elsewhere)
        progress.epoch = self.iteration
        # Resumed twice, torchdata (0.11) counts what it passed over in an iterable dataset once too often.
        is_resumed_again = point.batches > 0 and self._num_readers > 0
        skips = self.skipped_from is not None or self.skip_batches + self.left_out > 0
        progress.torchdata_counts = point.start == 0 and not is_resumed_again and not skips

    def _start_reading(self, loader: Any) -> Iterator[Any]:
        """Begin to read, and draw the seed of worker processes only where the run that never stopped draws one."""
        base, has_drawn_seed = self.base_dataloader, self._has_drawn_seed
        if getattr(base, "num_workers", 0):
            worker_shield(os.getpid())  # most programs start workers before they first read `should_stop`
        self._has_drawn_seed = bool(getattr(base, "persistent_workers", False))
        if self._continues_epoch:
            with RandomStreams(base, ("torch",)).borrowed():
                try:
                    return iter(loader)
                except StopIteration:  # torchdata (0.11) skipped more batches than the dataset has now
                    return iter(())
        if getattr(base, "next_iter_state", None) is not None and not self._is_placed_by_torchdata:
            self._begin_torchdata_epoch()
        self._is_placed_by_torchdata = False
        if has_drawn_seed and getattr(loader, "_iterator", None) is None:
            return _iterate_with_spare_seed(loader)
        return iter(loader)

    def _begin_torchdata_epoch(self) -> None:
        """Restore the state of a dataset after an epoch that was read to its end."""
        # Torchdata (0.11) would restore the finished iterator, which repeats all reads and draws of its epoch, and then
        # create a second iterator with a second seed. Nothing but the dataset's state matters to the next epoch.
        base = self.base_dataloader
        if hasattr(base.dataset, "load_state_dict"):
            if base.persistent_workers:
                with RandomStreams(base).borrowed():
                    base._iterator = base._get_iterator()
            elif base.num_workers == 0:
                state = base.next_iter_state["dataset_state"]
                if state is None:  # the dataset is its own iterator
                    state = base.next_iter_state["fetcher_state"]["dataset_iter_state"]
                base.dataset.load_state_dict(state)
        base.next_iter_state = None

    def _place_dataset(self, point: ResumePoint) -> bool:
        """Put a dataset that saves its own state where it was saved; return whether that was possible."""
        base = self.base_dataloader
        # A state behind the files of one process says nothing about those of another.
        view = getattr(base, "dataset", None)
        is_own = view.goes_on_after(point) if isinstance(view, DataSource) else not point.files
        can = point.dataset is not None and is_own and saves_its_state(base)
        if can:
            whole_dataset(base).load_state_dict(point.dataset)
        elif self._dataset_was_placed and is_hf_dataset(whole_dataset(base), "IterableDataset"):
            # It would begin there again whenever it is asked for the same epoch.
            whole_dataset(base).load_state_dict(None)
        self._dataset_was_placed = can
        return can

    def _warn_of_length(self, number: int | str, length: int) -> None:
        """Say that a length of the user's was wrong, and believe it no more."""
        self._misstates_length = True
        logger.warning(
            "A loader was to give %d batches, by the length of its sampler or dataset, and gave %s: a batch was wrongly taken "
            "for the last one, or the last one not known as such. From now on it is read one batch ahead. Let `__len__` "
            "return the number of samples, or raise a TypeError if it is not known.",
            length,
            number,
        )

    def _complete(self) -> None:
        """Count a pass that was read to its end."""
        self.iteration += 1
        self._finish()
        whole = self.skipped_from
        if whole is not None and whole._continued_by is self:
            whole._continued_by = None
        if whole is not None and whole.iteration < self.iteration:
            whole.iteration = self.iteration
            whole._finish()

    def _end_empty_rest(self, start: int) -> None:
        """Count a pass without a batch, which was to begin after `start` samples of the epoch."""
        if self._continues_saved and not getattr(self, "_drop_last", False):
            warn_once(
                f"This loader stopped after {start} samples of epoch {self.iteration}, which has no more than that now. Epoch "
                f"{self.iteration + 1} is next."
            )
        self._complete()

    def state_dict(self) -> dict[str, Any]:
        """Return what resumes this loader after the batch at hand, although the next one may be read already."""
        if self._continued_by is not None:
            return self._continued_by.state_dict()
        point = self._resume_point()
        own = {**point.state_dict(), **self._randomness()}
        if point.samples and self._epoch_source is not None:
            own |= self._epoch_source.state_dict()
        if not self._has_stateful_base:
            return own
        # Before the first batch there is nothing to save, and torchdata's loader would draw a seed to say so.
        inner = self.dl_state_dict or {}
        own["layout"] = self._layout if point.is_reached_by_torchdata else []
        own["batches"] = point.batches
        return {**inner, _OWN_STATE: own}

    def beginning_state_dict(self) -> dict[str, Any]:
        """Return what resumes this loader at the start of its epoch, wherever it stands in it."""
        point = self._resume_point()
        return {**ResumePoint(point.epoch, order=point.order).state_dict(), **self._randomness()}

    def _randomness(self) -> dict[str, Any]:
        """Return what later orders come from: seeds, and the states of generators that the user gave to the loader."""
        last = self.epoch_progress
        is_at_end = last is not None and not last.is_finished and getattr(self, "end_of_dataloader", False)
        if self._generators is None:
            self._generators = own_streams(self.base_dataloader)
        with last.order.finished() if last is not None and is_at_end and self._generators else nullcontext():
            generators = {name: stream.take() for name, stream in self._generators.items()}
        own = {"base_seeds": [seed.base for seed in self._seeds], "generators": generators}
        return {**own, "has_drawn_seed": True} if self._has_drawn_seed else own

    def _resume_point(self) -> ResumePoint:
        """Return what a later pass needs to go on where this loader stands."""
        if self._resume is not None:
            return self._resume
        if self.epoch_progress is None:
            return ResumePoint(self.iteration, is_reached_by_torchdata=True)
        return self.epoch_progress.resume_point(self.position, workers=self._num_readers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict` was taken; the next iteration gives the next batch.

        Raises:
            ConfigurationError: (a ValueError) if the state was saved by torchdata's loader alone, and this one is not.
            CheckpointError: If it cannot be the state of a loader; nothing has changed then.
        """
        own = state_dict.get(_OWN_STATE, state_dict)
        inner = {} if own is state_dict else {name: state_dict[name] for name in state_dict if name != _OWN_STATE}
        if "epoch" not in own:
            if not self._has_stateful_base:
                raise ConfigurationError(
                    f"load_state_dict was given the keys {sorted(state_dict)!r}, which torchdata's StatefulDataLoader "
                    "writes: they say nothing of samples; prepare the loader with use_stateful_dataloader=True"
                )
            own, inner = {}, state_dict
        check_loader_state(own, "What load_state_dict was given")
        self._is_placed_by_torchdata = not own
        for seed, base in zip(self._seeds, own.get("base_seeds", ()), strict=False):
            if base is not None:
                seed.restore(base)
        if own.get("generators"):
            RandomStreams(self.base_dataloader, ()).put(own["generators"])
        point = ResumePoint.from_state_dict(own, self.iteration)
        self._has_drawn_seed = own.get("has_drawn_seed", False)
        if getattr(self.base_dataloader, "persistent_workers", False):
            self.base_dataloader._iterator = None  # new workers, whose seed is drawn if it was not before the save
        before, now = EpochSource.from_state_dict(own), self._epoch_source
        if point.samples and before is not None and now is not None and now.ends_before(point, before):
            self.dl_state_dict = None
            self._go_to(ResumePoint(point.epoch + 1))
            return
        if self._has_stateful_base and inner and own.get("layout", self._layout) == self._layout:
            self._go_to(point._replace(batches=own.get("batches", 0), is_reached_by_torchdata=True))
            self.dl_state_dict = inner
            self.base_dataloader.load_state_dict(inner)
            return
        if point.samples:
            self._warn_if_inexact(point)
        self.dl_state_dict = None
        self._go_to(point)

    def _warn_if_inexact(self, point: ResumePoint) -> None:
        """Warn if the rest of an epoch cannot be told from what was seen of it."""
        readers = self._num_readers
        if point.workers and readers and point.workers != readers:
            warn_once(
                f"This loader stopped inside an epoch that {point.workers} worker processes were reading, and goes on with "
                f"{readers}. An iterable dataset divides its samples among its workers, so some of them may repeat or be "
                f"missed until the epoch ends. Go on with num_workers={point.workers} to see each once."
            )
        if not (self.split_elsewhere and point.unit):
            return
        total = None
        with suppress(AttributeError, TypeError):
            total = self.total_batch_size
        if total is not None and point.unit != total:
            warn_once(
                f"This loader stopped inside an epoch after steps of {point.unit} samples and goes on with steps of "
                f"{total}, and its data was divided among the processes before it came to prepare. Which "
                "samples were seen is then not known: some may repeat or be missed until the epoch ends. Let prepare "
                "divide the data, or go on with the number of processes and the batch size of before."
            )

    def _saves_state(self) -> Callable[[], Any] | None:
        """Return what gives the state of torchdata's loader, or of a dataset that saves its own; None if nothing does."""
        base = self.base_dataloader
        if self._has_stateful_base:
            return cast("Callable[[], Any]", base.state_dict)
        return cast("Callable[[], Any]", whole_dataset(base).state_dict) if saves_its_state(base) else None

    def _keep_state(self, state: Any, *, is_last: bool) -> None:
        """Keep the state that was taken behind the batch at hand."""
        if self._has_stateful_base:
            self.dl_state_dict = {**state, "_iterator_finished": True} if is_last else state
        elif self.epoch_progress is not None:
            self.epoch_progress.dataset_state = state

    @property
    def _has_stateful_base(self) -> bool:
        return hasattr(self.base_dataloader, "load_state_dict")

    @property
    def _num_readers(self) -> int:
        """Processes whose number decides which samples of an iterable dataset come when; 0 for indexed data."""
        base = self.base_dataloader
        is_iterable = isinstance(getattr(base, "dataset", None), IterableDataset)
        return max(getattr(base, "num_workers", 0), 1) if is_iterable else 0

    @property
    def _layout(self) -> list[int]:
        """What the meaning of a number of batches, as torchdata saves it, depends on."""
        return [getattr(self.base_dataloader, "batch_size", None) or 0]

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: states are taken before the next batch is read, so there is nothing to adjust."""
