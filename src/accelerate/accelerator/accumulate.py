"""The context of one micro-batch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate.accelerator.training import TrainingMixin


class Accumulate:
    """Tick the gradient clock on entry, and hold back the exchange of gradients while a window is open.

    A plain class, because a training step enters it and a generator-based context manager costs several times more.
    """

    __slots__ = ("_accelerator", "_entered", "_models")

    def __init__(self, accelerator: TrainingMixin, models: tuple[torch.nn.Module, ...]) -> None:
        self._accelerator = accelerator
        self._models = models
        self._entered: list[AbstractContextManager[Any]] | None = None

    def __enter__(self) -> None:
        accelerator = self._accelerator
        accelerator._tick()
        state = accelerator.gradient_state
        if state.sync_gradients or not accelerator.strategy.caps.holds_back_gradients or state.sync_each_batch:
            return
        self._entered = []
        for model in self._models:
            context = accelerator.strategy.no_sync(model)
            context.__enter__()
            self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._entered is not None:
            for context in reversed(self._entered):
                context.__exit__(kind, error, traceback)
            self._entered = None
        self._accelerator._window.leave()
