"""What a program holds in the place of an optimizer or a schedule that DeepSpeed makes or drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from accelerate.scheduler import AcceleratedScheduler, SteppingOptimizer


class DummyOptim:
    """Stand for the optimizer that DeepSpeed's configuration describes.

    Args:
        params: The parameters to train, or groups of them.
        lr: The learning rate for a configuration that leaves it open.
        weight_decay: The weight decay for a configuration that leaves it open.
        kwargs: What else the program wants to keep with it.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.001,
        weight_decay: float = 0,
        **kwargs: Any,
    ) -> None:
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs


class DummyScheduler:
    """Stand for the schedule that DeepSpeed's configuration describes, or that a function makes of its optimizer.

    Args:
        optimizer: The optimizer, or what stands for it.
        total_num_steps: Steps of the schedule, for a configuration that leaves them open.
        warmup_num_steps: Steps of its warm-up.
        lr_scheduler_callable: Called with the optimizer; returns the schedule.
        kwargs: What else the program wants to keep with it.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule that DeepSpeed's engine steps, together with its optimizer.

    Args:
        scheduler: The schedule that the engine drives.
        optimizers: The prepared optimizer or optimizers it belongs to.
    """

    def __init__(self, scheduler: LRScheduler, optimizers: SteppingOptimizer | Sequence[SteppingOptimizer]) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has stepped."""
