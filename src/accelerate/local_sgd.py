"""Local SGD: replicas train alone for a while and average their weights now and then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Self

from accelerate._base.errors import ConfigurationError
from accelerate._base.lazy import attach_passing_names
from accelerate.collectives.base import communicator

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

attach_passing_names(__name__)


class LocalSGD:
    """Let replicas of a model step on their own gradients, and average their weights every few steps.

    Args:
        accelerator: The accelerator that prepared the model.
        model: The prepared model.
        local_sgd_steps: Calls of `step` between two averages. With gradient accumulation, a call for every batch counts
            batches: 8 averages after 4 updates where 2 batches make one.
        enabled: False leaves training as it is; so does a single process.

    Raises:
        ConfigurationError: If the run does not train replicas, or the number of steps is not positive.

    Example:
        ```python
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
        ```
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if accelerator.use_distributed and enabled and not accelerator.strategy.caps.replicates:
            raise ConfigurationError(
                f"LocalSGD was given a run under {accelerator.strategy.name!r}, but it averages whole replicas. "
                "Use it with DDP, or pass enabled=False."
            )
        if local_sgd_steps < 1:
            raise ConfigurationError(f"local_sgd_steps={local_sgd_steps!r} is not a number of steps. Write 1 or more.")
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        if self.enabled:
            self.accelerator = accelerator
            self.model = model
            self.local_sgd_steps = local_sgd_steps
            self._alone: AbstractContextManager[Any] | None = None

    def __enter__(self) -> Self:
        if self.enabled:
            self._alone = self.accelerator.no_sync(self.model)
            self._alone.__enter__()
        return self

    def __exit__(self, type: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if not self.enabled:
            return
        # After an exception on one rank the others are elsewhere: averaging would wait for ever.
        if type is None:
            self._average()
        if self._alone is not None:
            self._alone.__exit__(type, value, tb)

    def step(self) -> None:
        """Count a call, and average the weights at every multiple of `local_sgd_steps`."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        group = communicator()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(group.reduce(parameter.detach(), "mean"))
