"""What a program holds in the place of an optimizer or a schedule that DeepSpeed makes or drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler, SteppingOptimizer
from accelerate.strategies.deepspeed.engine import DeepSpeedEngineWrapper


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


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that DeepSpeed's engine steps: `step` is the engine's, and `zero_grad` drops what it has not used.

    Args:
        optimizer: The engine's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.engine: DeepSpeedEngineWrapper | None = None
        """Whose gradients it steps with; without one, somebody else steps the engine."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the engine, if the window is complete.

        Raises:
            ConfigurationError: If a closure was given, which the engine cannot call.
        """
        if closure is not None:
            raise ConfigurationError(
                "optimizer.step(closure) was called under DeepSpeed, whose engine steps once with the gradients that are "
                "there and cannot compute them again. Call backward() and then optimizer.step() without a closure."
            )
        state = self.gradient_state
        if not state.sync_gradients:
            return
        if self.progress is not None:
            self.progress.advance(state.active_dataloader)
        if self.engine is not None:
            self.engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients of a complete window that no step has used; a step drops those that it uses."""
        if self.engine is not None and self.gradient_state.sync_gradients:
            self.engine.drop_gradients()

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the engine skipped the last step because a gradient overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


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


_CPU_OPTIMIZERS = {
    "Adam": "DeepSpeedCPUAdam",
    "AdamW": "DeepSpeedCPUAdam",
    "Adagrad": "DeepSpeedCPUAdagrad",
    "Lion": "DeepSpeedCPULion",
}
_KEPT = {
    "DeepSpeedCPUAdam": ("lr", "weight_decay", "betas", "eps", "amsgrad"),
    "DeepSpeedCPUAdagrad": ("lr", "weight_decay", "eps"),
    "DeepSpeedCPULion": ("lr", "weight_decay", "betas"),
}


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return DeepSpeed's optimizer for states in host memory that does what one of torch or bitsandbytes does.

    Its groups of parameters keep their learning rates and other values.

    Raises:
        ConfigurationError: If DeepSpeed has none for it.
        MissingPackageError: If DeepSpeed is not installed.
    """
    names = [
        base.__name__.removesuffix("8bit").removesuffix("32bit").removeprefix("Paged")
        for base in type(optimizer).__mro__
    ]
    kind = next((name for name in names if name in _CPU_OPTIMIZERS), None)
    if kind is None:
        raise ConfigurationError(
            f"DeepSpeed has no optimizer for states in host memory that does what {type(optimizer).__name__} does. Use one of "
            f"{', '.join(_CPU_OPTIMIZERS)}, leave offload_optimizer out, or set 'zero_force_ds_cpu_optimizer' to false in "
            "DeepSpeed's configuration to step with it as it is."
        )
    target = _CPU_OPTIMIZERS[kind]
    folder = {"DeepSpeedCPUAdagrad": "adagrad", "DeepSpeedCPULion": "lion"}.get(target, "adam")
    made = getattr(require(f"deepspeed.ops.{folder}", why="offload_optimizer_device", extra="deepspeed"), target)
    options: dict[str, Any] = {name: optimizer.defaults[name] for name in _KEPT[target] if name in optimizer.defaults}
    if target == "DeepSpeedCPUAdam":
        options["adamw_mode"] = kind == "AdamW"
    groups = [
        {name: value for name, value in group.items() if name == "params" or name in _KEPT[target]}
        for group in optimizer.param_groups
    ]
    found: torch.optim.Optimizer = made(groups, **options)
    return found
