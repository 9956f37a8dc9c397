"""The optimizer that steps only when a window of gradients is complete."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError
from accelerate._base.lazy import attach_passing_names
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import GradientState, Progress

attach_passing_names(__name__)

ReplacedParameters = Mapping[torch.nn.Parameter, torch.nn.Parameter | None]
"""Old parameter -> the one in its place; None for one that is trained on another rank."""


def move_to_device(state: Any, device: torch.device) -> Any:
    """Return `state` with every tensor inside lists, tuples and dictionaries moved to `device`."""
    if isinstance(state, list | tuple):
        return type(state)(move_to_device(item, device) for item in state)
    if isinstance(state, dict):
        return {key: move_to_device(value, device) for key, value in state.items()}
    return state.to(device) if isinstance(state, torch.Tensor) else state


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` do nothing while gradients are being accumulated.

    With a gradient scaler it steps through it, and knows afterwards whether the step was skipped for an overflow.

    Args:
        optimizer: The optimizer to drive.
        device_placement: Move the optimizer's state to the device of this process.
        scaler: The gradient scaler of float16 training.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_state = GradientState()
        self.device_placement = device_placement
        self.accelerator_state: Any = None
        self._stepped = True
        self.progress: Progress | None = None
        self._overflow: torch.Tensor | None = None
        self.fused_backward = type(optimizer).__module__.startswith("lomo_optim")
        if device_placement and optimizer.state:
            _place_state(optimizer, current.runtime().device)
        if scaler is not None:
            self._watch_steps()

    def _watch_steps(self) -> None:
        """Learn from the optimizer itself whether the scaler let it step."""
        if isinstance(self.scaler, SharedGradScaler):
            self.scaler.expect(self.optimizer)
        try:
            self.optimizer.register_step_post_hook(self._note_step)
        except AttributeError:
            # An optimizer that never called torch's constructor has no hooks.
            self.optimizer.step = patch_optimizer_step(self, self.optimizer.step)  # type: ignore[method-assign]

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True
        # A fused optimizer is always called, is told of the overflow, and skips by itself.
        self._overflow = getattr(optimizer, "found_inf", None)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step, if the window is complete; through the scaler, if there is one."""
        state = self.gradient_state
        if not state.sync_gradients:
            return None
        if self.progress is not None:
            self.progress.advance(state.active_dataloader)
        if self.fused_backward:
            return None
        scaler = self.scaler
        if scaler is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self._stepped, self._overflow = False, None
        result: float | None = scaler.step(self.optimizer) if closure is None else scaler.step(self.optimizer, closure)
        if isinstance(scaler, SharedGradScaler):
            scaler.finish_step(self.optimizer)
        else:
            scaler.update()
        return result

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, if the window is complete."""
        if not self.gradient_state.sync_gradients:
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
            return
        try:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        except TypeError as error:
            raise ConfigurationError(
                f"zero_grad(set_to_none={set_to_none!r}) was called, but {type(self.optimizer).__name__}.zero_grad takes "
                "no such argument. Call zero_grad() without it."
            ) from error

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped because a gradient overflowed."""
        if self._overflow is not None:
            return bool(self._overflow.item())
        return not self._stepped

    def train(self) -> None:
        """Switch an optimizer that has modes (schedule-free ones) to training."""
        self._call_mode("train")

    def eval(self) -> None:
        """Switch an optimizer that has modes (schedule-free ones) to evaluation."""
        self._call_mode("eval")

    def _call_mode(self, mode: str) -> None:
        for optimizer in (self.optimizer, getattr(self.optimizer, "optimizer", None)):
            switch = getattr(optimizer, mode, None)
            if callable(switch):
                switch()
                return

    @property
    def state(self) -> Any:
        """Return the state of the inner optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of the inner optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the inner optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner optimizer, for a checkpoint."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the inner optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_overflow"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _overflow=None, gradient_state=GradientState())
        if self.scaler is not None:
            self._watch_steps()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def _place_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    on_device = all(
        value.device == device
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    if not on_device:
        optimizer.load_state_dict(move_to_device(optimizer.state_dict(), device))


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `step` that tells `accelerated_optimizer` when it is called, for optimizers without step hooks."""

    def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        accelerated_optimizer._note_step(optimizer, args, kwargs)
        return result

    return types.MethodType(step, accelerated_optimizer.optimizer)


def remap_optimizers(optimizers: Iterable[torch.optim.Optimizer], replaced: ReplacedParameters) -> None:
    """Replace parameters in the groups and states of optimizers; several may have been joined into one.

    Raises:
        ConfigurationError: If parameters of two groups were joined into one, or joined ones have a state.
    """
    sources: dict[int, int] = {}
    for new in replaced.values():
        sources[id(new)] = sources.get(id(new), 0) + 1
    for optimizer in optimizers:
        groups = [
            list(dict.fromkeys(new for new in (replaced.get(old, old) for old in group["params"]) if new is not None))
            for group in optimizer.param_groups
        ]
        every = [id(parameter) for parameters in groups for parameter in parameters]
        if len(every) != len(set(every)):
            raise ConfigurationError(
                f"This {type(optimizer).__name__} has {len(groups)} groups of parameters, but the engine joins parameters "
                "of several of them into one, which can have one learning rate only. Set use_orig_params=True of the "
                "FSDP plugin, or fsdp_version=2."
            )
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        for old in [parameter for parameter in replaced if parameter in optimizer.state]:
            state, new = optimizer.state.pop(old), replaced[old]
            if new is None:
                continue
            if sources[id(new)] > 1:
                raise ConfigurationError(
                    f"This {type(optimizer).__name__} has already a state for parameters that the engine joins into one, "
                    "which cannot take it over. Prepare it before its first step, and restore its state with "
                    "load_state()."
                )
            optimizer.state[new] = {name: _like_parameter(value, old, new) for name, value in state.items()}


def _like_parameter(value: Any, old: torch.Tensor, new: Any) -> Any:
    """Return an entry of an optimizer's state, spread over ranks as its parameter is."""
    is_split = hasattr(new, "placements") and not hasattr(value, "placements")
    if not (is_split and isinstance(value, torch.Tensor) and value.shape == old.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
