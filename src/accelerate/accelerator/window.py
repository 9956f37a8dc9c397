"""What the gradients of one accumulation window are divided by."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .._base.errors import UsageError
from ..collectives import communicator
from ..runtime import current
from ..strategies.base import Strategy


class AccumulationWindow:
    """Normalise a window whose length or number of items is known only when it closes.

    Losses are added up as they come. At the first backward pass of the closing micro-batch the divisor is known: the
    gradients that are there are scaled once, and later losses of the same micro-batch are scaled before their backward
    pass. So the gradients are final as soon as the last backward pass returns.
    """

    def __init__(self) -> None:
        self.length = 0
        """Micro-batches of the window so far, the current one included."""
        self.closed = True
        self._items: torch.Tensor | None = None
        self._unit: float | None = None
        self._factor: torch.Tensor | float | None = None
        self._backwards = 0

    def advance(self, closes: bool) -> None:
        """Begin a micro-batch, the first of a new window if the last one closed its window."""
        if self.closed:
            self.restart()
        self.length += 1
        self.closed = closes

    def restart(self) -> None:
        """Begin a new window."""
        self.length = 0
        self._items = None
        self._factor = None
        self._backwards = 0

    def backward(
        self,
        strategy: Strategy,
        loss: torch.Tensor,
        parameters: Iterable[torch.nn.Parameter],
        *,
        num_steps: int,
        closes: bool,
        num_items: float | torch.Tensor | None,
    ) -> None:
        """Compute gradients of `loss` so that the closed window is divided by its own length or by its items."""
        if (self._items is not None) != (num_items is not None) and self._backwards > 0:
            raise UsageError(
                "backward(num_items=...) was given for some micro-batches of an accumulation window and not for others, "
                "so there is no common divisor. Pass num_items to every backward() of the window, or to none."
            )
        loss = loss / (num_steps if num_items is None else self._unit_of(loss, num_items, num_steps))
        if self._factor is not None:
            strategy.backward(loss * self._factor)
            return
        if num_items is not None:
            self._count(loss, num_items)
        factor = self._closing_factor(num_steps) if closes else None
        first = self._backwards == 0
        self._backwards += 1
        if factor is None:
            strategy.backward(loss)
        elif first:
            strategy.backward(loss * factor)
        else:
            strategy.backward(loss)
            strategy.scale_gradients(parameters, factor)
        self._factor = factor

    def _unit_of(self, loss: torch.Tensor, num_items: float | torch.Tensor, num_steps: int) -> float:
        """Return a divisor near the final one, agreed once by all ranks, that keeps losses small until it is known."""
        if self._unit is None:
            own = torch.as_tensor(num_items, dtype=torch.float64).to(loss.device).reshape(())
            self._unit = max(float(communicator().reduce(own, "max")) * num_steps, 1.0)
        return self._unit

    def _count(self, loss: torch.Tensor, num_items: float | torch.Tensor) -> None:
        items = torch.as_tensor(num_items, device=loss.device, dtype=torch.float32).reshape(()).detach()
        self._items = items if self._items is None else self._items + items

    def _closing_factor(self, num_steps: int) -> torch.Tensor | float | None:
        if self._items is not None:
            total = communicator().reduce(self._items, "sum").clamp(min=1)
            # Replicas average their gradients, so the mean over all items is the average times the number of ranks.
            return (self._unit or 1.0) * current.runtime().world_size / total
        return num_steps / self.length if 0 < self.length < num_steps else None
