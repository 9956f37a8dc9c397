"""What all prepared loaders have in common: composition around a loader, the clock's flags, position and state."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader

from .._base.errors import ConfigurationError
from ..runtime.gradient_clock import GradientState
from .ledgers import Ledger
from .parts import get_sampler, nested_samplers, set_sampler, stateful_class
from .plan import UNKNOWN_SHARE, MicroBatch, Share
from .position import Position
from .samplers import EpochSeed

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
        self._pending_unit = 0
        self._restored = False
        self._taken = 0
        self._resumed_batches = 0
        self._resumed_samples = 0
        self._finished = True
        self._origin: Any = None
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
        return _rebuild, (type(self), dict(self.__dict__))

    iteration: int = 0
    _batches_per_step: int = 1

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
        self.iteration = position.epoch
        self._pending = position
        self._pending_unit = unit
        self._restored = True
        self._finished = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, and tell samplers and dataset."""
        if self._pending is not None and self._pending.epoch != epoch:
            self._pending = None
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

    def _take_start(self) -> tuple[int, int]:
        """Return (samples to start after, unit they were counted in) for a pass that begins now."""
        start, unit = 0, 0
        if self._pending is not None:
            self.iteration, start, unit = self._pending.epoch, self._pending.samples, self._pending_unit
        elif self._fresh_after_break and not self._finished:
            # As a plain loader does, shuffle anew although the last pass was left early.
            self.iteration += 1
        self._pending, self._restored = None, False
        self._taken, self._finished = 0, False
        return start, unit

    def _complete(self) -> None:
        """Count a pass that was read to its end."""
        self.iteration += 1
        self._finished = True
        origin = self._origin
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
        position = self.position
        base_seeds = [seed.base for seed in self._seeds]
        unit = self._ledger.unit if self._ledger else 0
        own = {"epoch": position.epoch, "samples": position.samples, "base_seeds": base_seeds, "unit": unit}
        if not self._has_stateful_base:
            return own
        inner = self.dl_state_dict
        if inner is None:
            inner = self.base_dataloader.state_dict()
        return {**inner, _OWN_STATE: {**own, "batches": 0 if self._finished else self._taken}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where `state_dict` was taken; the next iteration gives the next batch."""
        own = state_dict.get(_OWN_STATE, {}) if self._has_stateful_base else state_dict
        for seed, base in zip(self._seeds, own.get("base_seeds", ()), strict=False):
            if base is not None:
                seed.restore(base)
        if not self._has_stateful_base or self._counts_otherwise(own.get("unit", 0)):
            self.seek(Position(own["epoch"], own["samples"]), own.get("unit", 0))
            return
        self.iteration = own.get("epoch", self.iteration)
        self._resumed_samples = own.get("samples", 0)
        self._resumed_batches = own.get("batches", 0) if self._resumed_samples else 0
        self._restored, self._finished = True, True
        inner = {name: value for name, value in state_dict.items() if name != _OWN_STATE}
        self.dl_state_dict = inner
        self.base_dataloader.load_state_dict(inner)

    def _counts_otherwise(self, unit: int) -> bool:
        """Return whether a state was taken with other steps: torchdata counts batches, which then mean other samples."""
        with suppress(AttributeError, TypeError):
            total: int = self.total_batch_size
            return unit not in (0, total)
        return False

    @property
    def _has_stateful_base(self) -> bool:
        return hasattr(self.base_dataloader, "load_state_dict")

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: states are taken before the next batch is read, so there is nothing to adjust."""


def _rebuild(cls: type[Any], attributes: dict[str, Any]) -> Any:
    loader = object.__new__(cls)
    loader.__dict__.update(attributes)
    return loader
