"""The clocks of a run: when an accumulation window is complete, and how many epochs, updates and samples have passed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from accelerate._base.errors import CheckpointError
from accelerate._base.untrusted import is_whole, shown
from accelerate.config import env
from accelerate.config.plugins.training import GradientAccumulationPlugin
from accelerate.runtime import current

_COUNTERS = ("epoch", "step", "samples")


class ActiveLoader(Protocol):
    """What the clock asks of a loader that is being iterated."""

    end_of_dataloader: bool
    remainder: int


class PassCount(Protocol):
    """What the run asks of the count of one pass over a loader (`loader.epoch_progress`)."""

    counted: int | None
    taken: int

    @property
    def consumed(self) -> int:
        """Samples of the epoch that were handed out so far."""

    @property
    def consumed_before(self) -> int:
        """Samples of the epoch that were handed out before the pass."""


class _Loop(NamedTuple):
    """A loop over a loader, and the batches that other loops had read when it began."""

    loader: weakref.ReferenceType[Any]
    read_before: list[tuple[PassCount, int]]


class GradientState:
    """Shared bookkeeping of gradient accumulation: every instance shows the same values.

    Args:
        gradient_accumulation_plugin: Settings that replace the stored ones, where they are not the defaults.
    """

    _shared_state = current.GRADIENT

    sync_gradients: bool
    """Whether the gradients of this micro-batch complete a window: optimizers and schedulers step only then."""
    plugin_kwargs: dict[str, Any]
    _loops: list[_Loop]
    _growth: int
    _is_xla_gradients_synced: bool

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self.plugin_kwargs = {}
            self._loops = []
            self._growth = 1
            self._is_xla_gradients_synced = False
        if gradient_accumulation_plugin is not None:
            given = gradient_accumulation_plugin.to_kwargs()
            if given != self.plugin_kwargs:
                self.plugin_kwargs = given

    @property
    def initialized(self) -> bool:
        """Return whether any instance was made since the last reset."""
        return self._shared_state != {}

    @property
    def num_steps(self) -> int:
        """Return how many micro-batches make a window."""
        steps: int = self.plugin_kwargs.get("num_steps", 1) * self._growth
        return steps

    def set_num_steps(self, num_steps: int) -> None:
        """Let windows have `num_steps` micro-batches from now on."""
        self.plugin_kwargs["num_steps"] = num_steps
        self._growth = 1

    def grow(self, factor: int) -> None:
        """Let windows have `factor` times as many micro-batches as the program asked for.

        A batch that was made smaller because memory ran out keeps its update that way, whatever number of steps the
        program sets up again.
        """
        self._growth = factor

    @property
    def adjust_scheduler(self) -> bool:
        """Return whether schedulers count the micro-batches in which they do not step."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", False))

    @property
    def sync_with_dataloader(self) -> bool:
        """Return whether the end of a loader ends the window."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_each_batch(self) -> bool:
        """Return whether ranks exchange gradients after every micro-batch, to save memory."""
        return bool(self.plugin_kwargs.get("sync_each_batch", False))

    @property
    def normalizes_by_window(self) -> bool:
        """Return whether a short window is divided by its own length."""
        return self.plugin_kwargs.get("normalize") == "window"

    @property
    def active_dataloader(self) -> Any | None:
        """Return the loader whose loop was entered last, None outside of loops."""
        loops = self._loops
        while loops:
            loader = loops[-1].loader()
            if loader is not None:
                return loader
            loops.pop()
        return None

    @property
    def dataloaders_in_step(self) -> list[Any]:
        """Return the active loader, then the ones that were read since its loop began, as by `zip()`.

        An enclosing loop, or one that was left unfinished, does not advance while the active loader is read.
        """
        active = self.active_dataloader
        if active is None:
            return []
        read_before = self._loops[-1].read_before
        found = [active]
        for loop in self._loops[:-1]:
            loader = loop.loader()
            count = getattr(loader, "epoch_progress", None)
            is_paused = any(count is before and count.taken == taken for before, taken in read_before)
            if count is not None and loader is not active and not is_paused:
                found.append(loader)
        return found

    @property
    def passes(self) -> list[PassCount]:
        """Return the counts of the passes over the loaders being iterated."""
        if not self._loops:
            return []
        counts = (getattr(loop.loader(), "epoch_progress", None) for loop in self._loops)
        return [count for count in counts if count is not None]

    @property
    def dataloader_references(self) -> list[Any | None]:
        """Return the loaders being iterated, the innermost last, below them None."""
        alive = (loop.loader() for loop in self._loops)
        return [None, *(loader for loader in alive if loader is not None)]

    @dataloader_references.setter
    def dataloader_references(self, loaders: list[Any | None]) -> None:
        self._loops = []
        for loader in loaders:
            if loader is not None:
                self._add_dataloader(loader)

    @property
    def in_dataloader(self) -> bool:
        """Return whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether the batch at hand is the last of the innermost loader."""
        loader = self.active_dataloader
        return False if loader is None else bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Return the number of real samples of the innermost loader's last batch, -1 if unknown."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Return whether an XLA step has already reduced the gradients; FSDP reduces them by itself."""
        return self._is_xla_gradients_synced or env.flag("ACCELERATE_USE_FSDP")

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, value: bool) -> None:
        self._is_xla_gradients_synced = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    def _add_dataloader(self, dataloader: ActiveLoader, passes: Sequence[PassCount] | None = None) -> None:
        """Make this the active loader.

        Args:
            passes: The passes under way when the iterator was created, which `zip()` does for all loaders before it reads
                the first batch of any.
        """
        read_before = []
        for count in self.passes:
            began_together = passes is not None and count.taken == 1 and not any(count is other for other in passes)
            read_before.append((count, 0 if began_together else count.taken))
        self._loops.append(_Loop(weakref.ref(dataloader), read_before))

    def _remove_dataloader(self, dataloader: ActiveLoader) -> None:
        for index in range(len(self._loops) - 1, -1, -1):
            if self._loops[index].loader() is dataloader:
                del self._loops[index]
                return

    def __getstate__(self) -> dict[str, Any]:
        # Which loaders are being read is a fact of this process.
        return {**self.__dict__, "_loops": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.__dict__.update(state)

    @staticmethod
    def _reset_state() -> None:
        current.GRADIENT.clear()

    def __getattr__(self, name: str) -> Any:
        if not self._shared_state and (name in type(self).__annotations__ or hasattr(type(self), name)):
            raise AttributeError(
                f"GradientState has no {name!r} any more because the state was reset after this object was made. "
                "Make a new Accelerator()."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, num_steps={self.num_steps}, "
            f"end_of_dataloader={self.end_of_dataloader}, remainder={self.remainder})"
        )


class Progress:
    """The counters of a run, saved and restored with its checkpoints.

    An update costs a comparison and two integers; samples are worked out when somebody asks.
    """

    epoch: int
    """The epoch that `accelerator.epochs()` is in."""
    step: int
    """Optimizer updates so far: windows of gradients that were completed. One that overflowed counts too."""
    was_restored: bool
    """Whether the counters were taken from a checkpoint."""

    def __init__(self, epoch: int = 0, step: int = 0, samples: int = 0) -> None:
        self.epoch = epoch
        self.step = step
        self.samples = samples
        self.was_restored = False

    @property
    def samples(self) -> int:
        """Samples of all processes that training loaders have handed out, padding not counted."""
        return self._before + (self._pass.consumed - self._begin if self._pass is not None else 0)

    @samples.setter
    def samples(self, samples: int) -> None:
        self._before = samples
        # What counts is the pass that the next update belongs to.
        self._loader: Any = None
        self._pass: PassCount | None = None
        self._begin = self._pass_epoch = self._pass_number = 0

    def advance(self, loader: Any) -> None:
        """Count an update that was made with batches of this loader, None outside of loops."""
        self.step += 1
        self.follow(loader)

    def follow(self, loader: Any) -> None:
        """Count the samples of this loader from now on: it is being trained with."""
        if loader is not None and getattr(loader, "epoch_progress", None) is not self._pass:
            self._enter(loader)

    def _enter(self, loader: Any) -> None:
        """Begin to count another pass over a training loader."""
        if self._pass is not None:
            self._before += self._pass.consumed - self._begin
            self._pass.counted = self._pass.consumed
        self._loader, self._pass = loader, getattr(loader, "epoch_progress", None)
        if self._pass is not None:
            counted = self._pass.counted
            self._begin = self._pass.consumed_before if counted is None else counted
            self._pass_epoch, self._pass_number = self.epoch, loader.iteration
        for read in GradientState().dataloader_references:
            for trained in (read, getattr(read, "skipped_from", None)):
                if trained is not None:
                    trained.trains = True

    @property
    def next_epoch(self) -> int:
        """The epoch in which training goes on: the next one as soon as the last batch of this one is at hand."""
        if self._pass is None or self._pass_epoch != self.epoch:
            return self.epoch
        is_over: bool = self._loader.position.epoch > self._pass_number
        return self.epoch + is_over

    def state_dict(self) -> dict[str, int]:
        """Return the counters from which a run goes on."""
        return {"epoch": self.next_epoch, "step": self.step, "samples": self.samples}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on from the counters of another run.

        Raises:
            CheckpointError: If they are no counters; nothing has changed then.
        """
        counters: list[Any] = [state_dict.get(name) if isinstance(state_dict, dict) else None for name in _COUNTERS]
        if not all(map(is_whole, counters)):
            raise CheckpointError(
                f"{shown(state_dict)} was given as the counters of a run, and {', '.join(_COUNTERS)} must be whole numbers "
                "in it. Use another checkpoint."
            )
        self.epoch, self.step, self.samples = counters
        self.was_restored = True

    def restart(self) -> None:
        """Count from the beginning, and let go of the loader."""
        self.epoch = self.step = self.samples = 0
        self.was_restored = False

    def __reduce__(self) -> tuple[type[Progress], tuple[int, int, int]]:
        # Which loader is being read is a fact of this process.
        return type(self), (self.epoch, self.step, self.samples)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Progress) and self.__reduce__() == other.__reduce__()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"Progress(epoch={self.epoch}, step={self.step}, samples={self.samples})"
