"""What all prepared loaders have in common: composition around a loader, the clock's flags, position and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.data_loader.ledgers import Ledger
from accelerate.data_loader.own_place import keeps_its_place, whole_dataset
from accelerate.data_loader.parts import get_sampler, nested_samplers, set_sampler, stateful_class
from accelerate.data_loader.plan import UNKNOWN_SHARE, MicroBatch, Share
from accelerate.data_loader.position import Position, Trail
from accelerate.data_loader.recognise import is_hf_iterable
from accelerate.data_loader.samplers import EpochSeed
from accelerate.runtime.gradient_clock import GradientState

_OWN_STATE = "_accelerate"


class DataLoaderStateMixin:
    """The flags that the gradient clock reads while a loader is iterated."""

    end_of_dataloader: bool = False
    remainder: int = -1
    _drop_last: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.end_of_dataloader = False
        cls.remainder = -1

    def reset(self) -> None:
        """Put the flags back to what they are before a pass."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Start a pass: reset the flags and make this the clock's active loader."""
        self.reset()
        loader: Any = self
        # Datasets without a length, loaders without a batch size: the remainder stays unknown.
        with suppress(Exception):
            if not self._drop_last:
                self.remainder = loader.total_dataset_length % loader.total_batch_size
        GradientState()._add_dataloader(loader)

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

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        cls = stateful_class() if use_stateful_dataloader else DataLoader
        self._wrap(cls(dataset, batch_sampler=batch_sampler, **kwargs), use_stateful_dataloader)

    def _wrap(self, base: Any, use_stateful_dataloader: bool = False) -> None:
        self.base_dataloader = base
        self.use_stateful_dataloader = use_stateful_dataloader
        self.dl_state_dict: dict[str, Any] | None = None
        self._ledger: Ledger | None = None
        self._seeds: list[EpochSeed] = []
        self._pending: Position | None = None
        self._pending_trail = Trail()
        self._inner_is_pending = False
        self._inner_counts = True
        self._dataset_state: Any = None
        self._dataset_was_placed = False
        self._taken = 0
        self._resumed_batches = 0
        self._resumed_samples = 0
        self._finished = True
        self._origin: Any = None
        self._stand_in: Any = None
        self._fresh_after_break = False

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
        return _rebuild, (type(self), {**self.__dict__, "_stand_in": None})

    iteration: int = 0
    _batches_per_step: int = 1
    trains: bool = False
    """Whether an optimizer has stepped inside a loop over this loader."""
    _skips_to_restored: bool = False
    _is_rest: bool = False

    @property
    def share(self) -> Share:
        """Rows of this process's batch, padding included, and how many of the leading ones are real samples."""
        return self._ledger.share(self._taken) if self._ledger and self._taken else UNKNOWN_SHARE

    @property
    def microbatch(self) -> MicroBatch | None:
        """The batch's part in its window of `global_batch_size` samples, None without one."""
        return self._ledger.micro_batch(self._taken) if self._ledger and self._taken else None

    @property
    def position(self) -> Position:
        """Where the loader stands: the epoch, and the global samples of it that were handed out."""
        if self._stand_in is not None:
            return cast("Position", self._stand_in.position)
        if self._pending is not None:
            return self._pending
        if self._finished or self._ledger is None:
            return Position(self.iteration, 0)
        if getattr(self, "end_of_dataloader", False):
            return Position(self.iteration + 1, 0)
        return Position(self.iteration, self._ledger.consumed(self._taken))

    def seek(self, position: Position, unit: int = 0) -> None:
        """Make the next iteration start at a position, on whatever number of processes it was reached.

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
        self._go_to(position, Trail(unit))

    def _go_to(self, position: Position, trail: Trail) -> None:
        self._forget_pending()
        self.iteration = position.epoch
        self._pending, self._pending_trail = position, trail
        self._finished = True

    def _forget_pending(self) -> None:
        """Let the next iteration start at the beginning of its epoch, whatever was restored."""
        self._stand_in = None
        if self._inner_is_pending and hasattr(self.base_dataloader, "next_iter_state"):
            self.base_dataloader.next_iter_state = None  # torchdata's only way back
        self._pending, self._pending_trail, self._inner_is_pending = None, Trail(), False
        self._resumed_batches, self._resumed_samples = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, and tell samplers and dataset."""
        if self._pending is not None and self._pending.epoch != epoch:
            self._forget_pending()
        if self._stand_in is not None and self._stand_in.iteration != epoch:
            self._stand_in = None
        self.iteration = epoch
        if not self._is_running:
            self._finished = True
        self._forward_epoch(epoch)

    @property
    def _is_running(self) -> bool:
        return any(loader is self for loader in GradientState().dataloader_references)

    def _forward_epoch(self, epoch: int) -> None:
        for part in nested_samplers(self.base_dataloader):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        dataset = getattr(self.base_dataloader, "dataset", None)
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)  # type: ignore[union-attr]

    @property
    def _goes_on(self) -> bool:
        """Whether the next pass is the rest of one that was stopped inside its epoch."""
        return self._skips_to_restored or (self._pending is not None and self._pending.samples > 0)

    def _start_reading(self, loader: Any) -> Iterator[Any]:
        """Begin to read; the rest of a pass draws no seed from torch's generator, because its beginning has done so."""
        if not self._is_rest:
            return iter(loader)
        before = torch.get_rng_state()
        try:
            return iter(loader)
        finally:
            torch.set_rng_state(before)

    def _take_start(self) -> tuple[int, Trail]:
        """Return (samples to start after, how they were reached) for a pass that begins now."""
        self._is_rest = self._goes_on
        start, trail = 0, Trail()
        if self._pending is not None:
            self.iteration, trail = self._pending.epoch, self._pending_trail
            start = 0 if self._inner_is_pending else self._pending.samples
        elif self._fresh_after_break and not self._finished:
            # As a plain loader does, shuffle anew although the last pass was left early.
            self.iteration += 1
        # Resumed twice, torchdata (0.11) counts what it passed over in an iterable dataset once too often.
        self._inner_counts = start == 0 and not (self._num_readers and self._resumed_batches)
        self._stand_in = None
        if self._origin is not None:
            self._inner_counts = False
            self._origin._stand_in = self
        if not self._inner_is_pending:
            self._resumed_batches, self._resumed_samples = 0, 0
        self._pending, self._inner_is_pending, self._dataset_state = None, False, None
        if self._ledger is not None:
            # The notes of a sampler are about its last pass only.
            self._ledger.final = self._ledger.consumed(self._taken)
        self._taken, self._finished = 0, False
        return start, trail

    def _place_dataset(self, trail: Trail) -> bool:
        """Put a dataset that saves its own place where the trail ended; return whether that was possible."""
        base = self.base_dataloader
        can = trail.dataset is not None and keeps_its_place(base)
        if can:
            whole_dataset(base).load_state_dict(trail.dataset)
        elif self._dataset_was_placed and is_hf_iterable(whole_dataset(base)):
            # It would begin there again whenever it is asked for the same epoch.
            whole_dataset(base).load_state_dict(None)
        self._dataset_was_placed = can
        return can

    def _complete(self) -> None:
        """Count a pass that was read to its end."""
        self.iteration += 1
        self._finished = True
        origin = self._origin
        if origin is not None and origin._stand_in is self:
            origin._stand_in = None
        if origin is not None and origin.iteration < self.iteration:
            origin.iteration = self.iteration
            origin._finished = True

    def get_sampler(self) -> Any:
        """Return the sampler that gives the order."""
        return get_sampler(self.base_dataloader)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that gives the order."""
        set_sampler(self.base_dataloader, sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return what resumes this loader after the batch at hand, although the next one may be read already."""
        if self._stand_in is not None:
            return cast("dict[str, Any]", self._stand_in.state_dict())
        position = self.position
        own = self._beginning(position)
        own["samples"] = position.samples
        own |= self._trail(position).state_dict()
        if not self._has_stateful_base:
            return own
        inner = self.dl_state_dict
        if inner is None:
            inner = self.base_dataloader.state_dict()
        own["layout"] = self._layout if self._inner_counts else []
        own["batches"] = self._resumed_batches + self._taken if position.samples else 0
        return {**inner, _OWN_STATE: own}

    def beginning_state_dict(self) -> dict[str, Any]:
        """Return what resumes this loader at the start of its epoch, wherever it stands in it."""
        return self._beginning(self.position)

    def _beginning(self, position: Position) -> dict[str, Any]:
        return {"epoch": position.epoch, "samples": 0, "base_seeds": [seed.base for seed in self._seeds]}

    def _trail(self, position: Position) -> Trail:
        if self._pending is not None:
            return self._pending_trail
        if self._ledger is None or position.samples == 0:
            return Trail(0 if self._ledger is None else self._ledger.unit)
        trail = self._ledger.trail(self._taken)
        is_exact = self._ledger.is_boundary(self._taken)
        return replace(trail, workers=self._num_readers, dataset=self._dataset_state if is_exact else None)

    def _saves_state(self) -> Callable[[], Any] | None:
        """Return what gives the state of torchdata's loader, or of a dataset that saves its own; None if nothing does."""
        base = self.base_dataloader
        if self._has_stateful_base:
            return cast("Callable[[], Any]", base.state_dict)
        return cast("Callable[[], Any]", whole_dataset(base).state_dict) if keeps_its_place(base) else None

    @property
    def _num_readers(self) -> int:
        """Processes whose number decides which samples of an iterable dataset come when; 0 for indexed data."""
        base = self.base_dataloader
        is_iterable = isinstance(getattr(base, "dataset", None), IterableDataset)
        return max(getattr(base, "num_workers", 0), 1) if is_iterable else 0

    @property
    def _layout(self) -> list[int]:
        """What the meaning of a number of batches, as torchdata saves it, depends on."""
        size = getattr(self.base_dataloader, "batch_size", None)
        return [size or 0]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict` was taken; the next iteration gives the next batch.

        Raises:
            ConfigurationError: (a ValueError) if the state was saved by torchdata's loader alone, and this one is not.
        """
        own = state_dict.get(_OWN_STATE, state_dict)
        inner = (
            {name: value for name, value in state_dict.items() if name != _OWN_STATE} if own is not state_dict else {}
        )
        if "epoch" not in own:
            if not self._has_stateful_base:
                raise ConfigurationError(
                    f"load_state_dict was given the keys {sorted(state_dict)!r}, which torchdata's StatefulDataLoader "
                    "writes: they say nothing of samples; prepare the loader with use_stateful_dataloader=True"
                )
            own, inner = {}, state_dict
        for seed, base in zip(self._seeds, own.get("base_seeds", ()), strict=False):
            if base is not None:
                seed.restore(base)
        if not (self._has_stateful_base and inner and own.get("layout", self._layout) == self._layout):
            self._resume_by_samples(own)
            return
        self._forget_pending()
        self.iteration = own.get("epoch", self.iteration)
        self._pending = Position(self.iteration, own.get("samples", 0))
        self._pending_trail = Trail.from_state_dict(own)
        self._inner_is_pending, self._finished = True, True
        self._resumed_samples = own.get("samples", 0)
        self._resumed_batches = own.get("batches", 0)
        self.dl_state_dict = inner
        self.base_dataloader.load_state_dict(inner)

    def _resume_by_samples(self, own: dict[str, Any]) -> None:
        position, trail = Position(own["epoch"], own["samples"]), Trail.from_state_dict(own)
        readers = self._num_readers
        if position.samples and trail.workers and readers and trail.workers != readers:
            warn_once(
                f"This loader stopped inside an epoch that {trail.workers} worker processes were reading, and goes on with "
                f"{readers}. An iterable dataset divides its samples among its workers, so some of them may repeat or be "
                f"missed until the epoch ends. Go on with num_workers={trail.workers} to see each once."
            )
        self._say_if_divided_otherwise(position, trail)
        self.dl_state_dict = None
        self._go_to(position, trail)

    def _say_if_divided_otherwise(self, position: Position, trail: Trail) -> None:
        """Warn if somebody else divided the data, and for another number of processes."""

    @property
    def _has_stateful_base(self) -> bool:
        return hasattr(self.base_dataloader, "load_state_dict")

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: states are taken before the next batch is read, so there is nothing to adjust."""


def _rebuild(cls: type[Any], attributes: dict[str, Any]) -> Any:
    loader = object.__new__(cls)
    loader.__dict__.update(attributes)
    return loader
