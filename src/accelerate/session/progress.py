"""How far a run has come: epochs, optimizer updates and samples, counted once for all processes."""

from __future__ import annotations

from typing import Any

from accelerate.runtime.gradient_clock import GradientState


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
        return self._before + (self._handed_out() - self._begin if self._pass is not None else 0)

    @samples.setter
    def samples(self, samples: int) -> None:
        self._before = samples
        # What counts is the pass that the next update belongs to.
        self._loader: Any = None
        self._pass: Any = None
        self._begin = self._pass_epoch = self._pass_number = 0

    def advance(self, loader: Any) -> None:
        """Count an update that was made with batches of this loader, None outside of loops."""
        self.step += 1
        self.follow(loader)

    def follow(self, loader: Any) -> None:
        """Count the samples of this loader from now on: it is being trained with."""
        if loader is not None and getattr(loader, "_ledger", None) is not self._pass:
            self._enter(loader)

    def _enter(self, loader: Any) -> None:
        """Begin to count another pass over a training loader."""
        if self._pass is not None:
            self._before += self._handed_out() - self._begin
            self._pass.counted = self._handed_out()
        self._loader, self._pass = loader, getattr(loader, "_ledger", None)
        if self._pass is not None:
            counted = self._pass.counted
            self._begin = self._pass.consumed(0) if counted is None else counted
            self._pass_epoch, self._pass_number = self.epoch, loader.iteration
        for read in GradientState().dataloader_references:
            for trained in (read, getattr(read, "_origin", None)):
                if trained is not None:
                    trained.trains = True

    def _handed_out(self) -> int:
        """Return where the pass stands, or stood when the next one over its loader began."""
        final: int | None = self._pass.final
        handed_out: int = self._pass.consumed(self._loader._taken) if final is None else final
        return handed_out

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
        """Go on from the counters of another run."""
        self.epoch, self.step, self.samples = state_dict["epoch"], state_dict["step"], state_dict["samples"]
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
