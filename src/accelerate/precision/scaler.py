"""A gradient scaler that several optimizers can share."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from accelerate.runtime.torch_private import PartwiseGradScaler, is_unscaled, overflow_flags


class SharedGradScaler(PartwiseGradScaler):
    """Update the scale once all optimizers of an iteration have stepped.

    torch wants one `update()` after the last optimizer of an iteration: an update in between forgets that the
    gradients of the next optimizer were already unscaled, and they are divided by the scale a second time. With one
    optimizer the update follows its step; with several it waits until each has stepped, or until the next loss is
    scaled or the scale is looked at.
    """

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped: set[int] = set()

    def expect(self, optimizer: torch.optim.Optimizer) -> None:
        """Name an optimizer that steps through this scaler."""
        self._optimizers.add(optimizer)

    def finish_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that `optimizer` has stepped or was skipped, and update the scale if it was the last."""
        self._stepped.add(id(optimizer))
        if all(id(expected) in self._stepped for expected in self._optimizers):
            self.flush()

    def flush(self) -> None:
        """Update the scale now, if optimizers have stepped since the last update."""
        if self._stepped:
            self._stepped.clear()
            self.update()

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or nested losses, by the scale."""
        if self._stepped:
            self.flush()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, and learn whether any overflowed."""
        super().unscale_(optimizer)
        if self.agree_on_overflow:
            for flag in overflow_flags(self, optimizer):
                torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step an optimizer unless a gradient overflowed."""
        if self.agree_on_overflow and not is_unscaled(self, optimizer):
            self.unscale_(optimizer)  # a fused optimizer would unscale by itself, and look at this rank only
        return super().step(optimizer, *args, **kwargs)

    def get_scale(self) -> float:
        """Return the scale."""
        # A look between two steps must not make the scaler forget that the gradients of the second were unscaled.
        waiting = (entry for entry in self._optimizers if id(entry) not in self._stepped)
        if not any(is_unscaled(self, entry) for entry in waiting):
            self.flush()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        self.flush()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()
        state = super().__getstate__()
        state.pop("_optimizers", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._optimizers = weakref.WeakSet()
