"""Full precision: what every number format is unless it says otherwise."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate.config.plugins.training import AutocastKwargs


class Precision:
    """Run in the dtype that the program chose: no context, no scaler, nothing wrapped."""

    name = "no"
    scaler: torch.amp.GradScaler | None = None
    native_amp = False

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context in which a forward pass runs."""
        return nullcontext()

    def wrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make every forward pass of `model` run in the context; returns the same model."""
        return model

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of `loss`."""
        loss.backward(**kwargs)
