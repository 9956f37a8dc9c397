"""What the gradients of one accumulation window are divided by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accelerate._base.errors import UsageError
from accelerate.collectives import communicator
from accelerate.runtime import current
from accelerate.strategies.base import Strategy

_COUNTS = ("length", "_items", "_unit", "_factor", "_backwards")


class AccumulationWindow:
    """Normalise a window whose length or number of items is known only when it closes.

    Losses are added up as they come. At a backward pass of the closing micro-batch the divisor is known as far as items
    were named: the gradients that are there are brought to it, and so is the loss before its backward pass. So the
    gradients are final as soon as the last backward pass returns.
    """

    def __init__(self) -> None:
        self.length = 0
        """Micro-batches of the window so far, the current one included; 0 outside of windows."""
        self.closed = False
        self._items: torch.Tensor | None = None
        self._unit: float | None = None
        self._factor: torch.Tensor | float | None = None
        self._backwards = 0

    def advance(self, closes: bool) -> None:
        """Begin a micro-batch."""
        self.length += 1
        self.closed = closes

    def leave(self) -> None:
        """End a micro-batch, and the window with it if it was the last."""
        if self.closed:
            self.restart()

    def restart(self) -> None:
        """Forget the window: the next micro-batch is the first of a new one."""
        self.length = 0
        self.closed = False
        self._items = None
        self._factor = None
        self._backwards = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of the open window; what outlives windows if none is open, and nothing if there is nothing."""
        if self.length and not self.closed:
            return {name: getattr(self, name) for name in _COUNTS}
        return {"_unit": self._unit} if self._unit is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in a window whose counts were saved; an empty dictionary begins anew."""
        self.restart()
        self._unit = None
        for name, value in state_dict.items():
            setattr(self, name, value)

    def share_of(self, states: Sequence[dict[str, Any]], saved_ranks: int, ranks: int) -> tuple[dict[str, Any], float]:
        """Return the counts of one of `ranks` ranks, and what the sum of the gradients of all saved ranks is divided by.

        Replicas average their gradients when the window closes. Losses were divided on each rank, so the average over the
        ranks that were there is given to every rank; with items the divisor comes from their sum, and so it is the sum
        that is spread.
        """
        items = [state["_items"] for state in states if state.get("_items") is not None]
        if not items:
            return states[0], saved_ranks
        return {**states[0], "_items": torch.stack(items).sum(0) / ranks}, ranks

    def note_plain(self) -> None:
        """Note a backward pass that was not normalised here.

        Raises:
            UsageError: If others of the window named their items.
        """
        self._refuse_mixture(None)
        self._backwards += 1

    def backward(
        self,
        strategy: Strategy,
        loss: torch.Tensor,
        parameters: Iterable[torch.nn.Parameter],
        *,
        num_steps: int,
        closes: bool,
        num_items: float | torch.Tensor | None,
        **kwargs: Any,
    ) -> None:
        """Compute gradients of `loss` so that the closed window is divided by its own length or by its items."""
        self._refuse_mixture(num_items)
        loss = loss / (num_steps if num_items is None else self._unit_of(loss, num_items, num_steps))
        if num_items is not None:
            self._count(loss, num_items)
        if closes and strategy.caps.hides_open_gradients:
            loss, left = self._normalise_later(loss, num_steps)
        else:
            loss, left = self._normalise(strategy, loss, parameters, num_steps) if closes else loss, None
        self._backwards += 1
        strategy.backward(loss, **kwargs)
        if left is not None:
            strategy.scale_gradients(parameters, left)

    def _refuse_mixture(self, num_items: float | torch.Tensor | None) -> None:
        if self._backwards > 0 and (self._items is not None) != (num_items is not None):
            raise UsageError(
                "backward(num_items=...) was given for some micro-batches of an accumulation window and not for others, "
                "so there is no common divisor. Pass num_items to every backward() of the window, or to none."
            )

    def _normalise(
        self, strategy: Strategy, loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter], num_steps: int
    ) -> torch.Tensor:
        """Bring the gradients that are there to the divisor known now, and return the loss at that divisor."""
        before = self._factor
        if before is None or self._items is not None:
            self._factor = self._closing_factor(num_steps)
            if self._factor is not None and self._backwards > 0:
                strategy.scale_gradients(parameters, self._factor if before is None else self._factor / before)
        return loss if self._factor is None else loss * self._factor

    def _normalise_later(self, loss: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        """Return the loss at the divisor of the gradients so far, and what brings their sum to the one known now.

        An engine that exchanges gradients at the end of a window keeps them out of reach until then.
        """
        before = self._factor
        if before is not None:
            loss = loss * before
        if before is not None and self._items is None:
            return loss, None
        self._factor = self._closing_factor(num_steps)
        return loss, self._factor if before is None or self._factor is None else self._factor / before

    def _unit_of(self, loss: torch.Tensor, num_items: float | torch.Tensor, num_steps: int) -> float:
        """Return a divisor near the final one, agreed once by all ranks, that keeps losses small until it is known."""
        if self._unit is None:
            self._unit = max(float(communicator().reduce(_count_of(loss, num_items), "max")) * num_steps, 1.0)
        return self._unit

    def _count(self, loss: torch.Tensor, num_items: float | torch.Tensor) -> None:
        items = _count_of(loss, num_items)
        self._items = items if self._items is None else self._items + items

    def _closing_factor(self, num_steps: int) -> torch.Tensor | float | None:
        if self._items is not None:
            total = communicator().reduce(self._items, "sum")
            # Replicas average their gradients, so the mean over all items is the average times the number of ranks.
            return (self._unit or 1.0) * current.runtime().world_size / torch.where(total > 0, total, 1.0)
        return num_steps / self.length if 0 < self.length < num_steps else None


def _count_of(loss: torch.Tensor, num_items: float | torch.Tensor) -> torch.Tensor:
    """Return the number of items beside the loss; in float64 only where the loss is, because some devices lack it."""
    dtype = torch.promote_types(loss.dtype, torch.float32)
    return torch.as_tensor(num_items).detach().to(device=loss.device, dtype=dtype).reshape(())
