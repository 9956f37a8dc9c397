"""The learning-rate scheduler that follows the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from accelerate._base.helpers import warn_once
from accelerate._base.lazy import attach_passing_names
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import GradientState

attach_passing_names(__name__)


class SteppingOptimizer(Protocol):
    """What a scheduler asks of the optimizers it follows."""

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped because a gradient overflowed."""
        ...


_HORIZONS = ("total_steps", "total_iters", "T_max", "num_training_steps")


def _horizon(scheduler: Any) -> int | None:
    """Return after how many steps a schedule ends, None if it does not say."""
    if isinstance(scheduler, SequentialLR):
        last = _horizon(scheduler._schedulers[-1])
        return None if last is None else scheduler._milestones[-1] + last
    # The schedules of Transformers are functions that carry their horizon as a keyword.
    keywords = [getattr(function, "keywords", {}) for function in getattr(scheduler, "lr_lambdas", ())]
    facts: list[dict[str, Any]] = [{name: getattr(scheduler, name, None) for name in _HORIZONS}, *keywords]
    return next((int(fact[name]) for fact in facts for name in _HORIZONS if fact.get(name)), None)


class AcceleratedScheduler:
    """A scheduler that steps only when its optimizers did.

    A schedule that was written for the batches of one process sees `num_processes` batches in each optimizer step,
    so it advances by that many steps at a time, unless one batch is split over all processes (`split_batches`) or
    the number of steps per update is given.

    Args:
        scheduler: The scheduler to drive.
        optimizers: The prepared optimizer or optimizers it belongs to.
        step_with_optimizer: Follow the optimizer; False passes every call of `step` on as it is.
        split_batches: One batch is split over all processes, so the schedule advances one step at a time.
        steps_per_update: How far the schedule advances per optimizer step; None derives it as said above.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: SteppingOptimizer | Sequence[SteppingOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        steps_per_update: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer
        self.gradient_state = GradientState()
        self._derived = steps_per_update is None and not split_batches
        self._pace = current.runtime().world_size if self._derived else (steps_per_update or 1)
        self.epoch_lengths: Sequence[int] = ()
        """How many single-process steps an epoch has: a horizon that is a multiple needs no warning."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers have stepped."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if getattr(optimizer, "step_was_skipped", False):
                return
        if self._pace > 1:
            self._warn_of_pace()
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._pace):
            # One-cycle schedules refuse to go past their end, where the learning rate stays.
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def _warn_of_pace(self) -> None:
        """Say once that the schedule runs several steps per update, unless it was written for that."""
        if not self._derived:
            return
        self._derived = False
        if current.runtime().rank != 0:
            return  # once a run, not once a process
        horizon = _horizon(self.scheduler)
        if horizon is not None and any(horizon % length == 0 for length in self.epoch_lengths if length):
            return
        example = horizon or 1000
        warn_once(
            f"This schedule advances {self._pace} steps at every optimizer step, because there are {self._pace} "
            f"processes: a schedule of {example} steps ends after {-(-example // self._pace)} updates. That is right if it "
            "was written for the batches of one process (the length of the loader before prepare()). If it was written "
            "in optimizer steps, use Accelerator(global_batch_size=...), or "
            "DataLoaderConfiguration(split_batches=True), or Accelerator(step_scheduler_with_optimizer=False).",
            stacklevel=3,
        )

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates that the last step set."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[Any]:
        """Return the learning rates that the schedule computes now."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rate, where the inner scheduler still can."""
        self.scheduler.print_lr(*args, **kwargs)  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner scheduler, for a checkpoint."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the inner scheduler."""
        self.scheduler.load_state_dict(state_dict)
