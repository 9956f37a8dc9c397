"""The training step: accumulate, backward, clip, and agree on flags."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.helpers import warn_once
from accelerate.accelerator.accumulate import Accumulate
from accelerate.accelerator.profiling import run_profile
from accelerate.accelerator.window import AccumulationWindow
from accelerate.collectives import communicator
from accelerate.config.plugins.training import AutocastKwargs, ProfileKwargs
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.precision.formats import Precision
from accelerate.runtime import current, debugger
from accelerate.runtime.gradient_clock import GradientState, Progress
from accelerate.runtime.torch_private import is_unscaled, rearm_reducer
from accelerate.strategies.base import Strategy

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


class TrainingMixin:
    """What a loop calls between one batch and the next."""

    strategy: Strategy
    precision: Precision
    gradient_state: GradientState
    step: int
    flag_tensor: torch.Tensor | None
    profile_handler: ProfileKwargs | None
    autocast_handler: AutocastKwargs | None
    global_batch_size: int | None
    even_batches: bool
    _models: list[torch.nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _dataloaders: list[Any]
    _window: AccumulationWindow
    _progress: Progress

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the gradient scaler of float16 training, None in other formats."""
        return self.precision.scaler

    @property
    def sync_gradients(self) -> bool:
        """Return whether the batch at hand completes a window of gradients."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return how many batches make a window of gradients."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.set_num_steps(gradient_accumulation_steps)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether any optimizer skipped its last step because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """Process one batch of a window: gradients are exchanged and optimizers step only when it is complete.

        Args:
            *models: The models whose gradients this batch computes.

        Example:
            ```python
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        return Accumulate(self, models)

    def _tick(self) -> None:
        """Advance the gradient clock by one batch and decide whether it completes a window."""
        state = self.gradient_state
        loader = state.active_dataloader
        microbatch = loader.microbatch if self.global_batch_size is not None and loader is not None else None
        if microbatch is not None:
            self.step += 1
            state.sync_gradients = microbatch.closes_window
        elif loader is not None and loader.end_of_dataloader and state.sync_with_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = self.step % state.num_steps == 0
        self._window.advance(state.sync_gradients)
        if not state.sync_gradients:
            self._progress.follow(loader)  # the update of a complete window does it by itself

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of `model` do not exchange gradients."""
        return self.strategy.no_sync(model)

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
        """Exchange gradients in the backward pass of this block although the forward pass ran under `no_sync`."""
        if not isinstance(model, DistributedDataParallel):
            yield
            return
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        rearm_reducer(model)
        try:
            yield
        finally:
            model.require_backward_grad_sync, model.require_forward_param_sync = before

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let ranks that run out of batches early wait for the others.

        Args:
            joinables: The models that take part.
            even_batches: Use this instead of the configured value for the prepared loaders inside the block.
        """
        if not self.strategy.caps.joinable:
            if current.runtime().is_distributed:
                warn_once(f"join_uneven_inputs does nothing under the strategy {self.strategy.name!r}.")
            yield
            return
        changed: list[tuple[Any, bool]] = []
        if even_batches is not None:
            for loader in self._dataloaders:
                sampler: Any = getattr(loader, "batch_sampler", None)
                if hasattr(sampler, "even_batches"):
                    changed.append((sampler, sampler.even_batches))
                    sampler.even_batches = even_batches
                else:
                    warn_once(
                        f"join_uneven_inputs(even_batches={even_batches!r}) does not reach a loader without a batch "
                        "sampler (an iterable dataset): it keeps its own way."
                    )
        enabled = not (even_batches if even_batches is not None else self.even_batches)
        try:
            with Join(list(joinables), enable=enabled, throw_on_early_termination=False):
                yield
            if enabled:
                self._count_updates_of_all()
        finally:
            for sampler, value in changed:
                sampler.even_batches = value

    def _count_updates_of_all(self) -> None:
        """Let a rank that ran out of batches count the updates that the others made without it."""
        steps = torch.tensor([self._progress.step], device=current.runtime().device)
        self._progress.step = int(communicator().reduce(steps, "max").item())

    def backward(self, loss: torch.Tensor, *, num_items: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Compute gradients of `loss`, divided by what the accumulation window calls for.

        Args:
            loss: A mean over the batch; with `num_items` a sum.
            num_items: How many items (tokens, say) the sum is over. The window's gradients are divided by the number
                of items of all its batches on all ranks: the gradient of the mean over all items. Several backward
                passes of one batch add their items up; 0 for another loss over items that were counted already.
            **kwargs: Passed to `Tensor.backward`.

        Example:
            ```python
            loss_sum = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
            accelerator.backward(loss_sum, num_items=(labels != -100).sum())
            ```
        """
        state = self.gradient_state
        learning_rate = kwargs.pop("learning_rate", None)
        num_steps = state.num_steps
        if self.has_lomo_optimizer:
            self.lomo_backward(loss / num_steps, learning_rate)
            return
        weight = self._microbatch_weight()
        if num_items is None and (weight is not None or num_steps == 1 or not state.normalizes_by_window):
            if self._window.length:
                self._window.note_plain()
            if weight is not None:
                loss = loss * weight
            elif num_steps != 1:
                loss = loss / num_steps
            self.strategy.backward(loss, **kwargs)
            return
        if weight == 0.0:
            loss, num_items = loss * 0.0, 0.0
        closes = state.sync_gradients
        self._window.backward(
            self.strategy, loss, self._parameters(), num_steps=num_steps, closes=closes, num_items=num_items, **kwargs
        )
        if self._window.length == 0 and closes:
            self._window.restart()  # a loop without accumulate(): every backward pass is a batch of its own

    def _microbatch_weight(self) -> float | None:
        """Return the weight of the batch at hand in its global batch, None without a global batch size."""
        if self.global_batch_size is None:
            return None
        loader = self.gradient_state.active_dataloader
        microbatch = loader.microbatch if loader is not None else None
        if microbatch is None:
            return None
        if self.gradient_state.sync_gradients and not microbatch.closes_window:
            raise UsageError(
                f"backward() was called for a part of a global batch of {microbatch.samples} samples outside of "
                "accumulate(), so the optimizer would step before the rest. Write `with accelerator.accumulate(model):` "
                "around the step."
            )
        return float(microbatch.weight)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        seen: set[int] = set()
        for model in self._models:
            for parameter in model.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    @property
    def has_lomo_optimizer(self) -> bool:
        """Return whether a prepared optimizer updates weights inside the backward pass (LOMO)."""
        return self._has_lomo

    _has_lomo: bool = False

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float | None) -> None:
        """Run the backward pass of a LOMO optimizer, which updates the weights on the way.

        Raises:
            ConfigurationError: If no learning rate was given or no LOMO optimizer was prepared.
        """
        lomo = [entry.optimizer for entry in self._optimizers if entry._fused_backward]
        if not lomo or learning_rate is None:
            raise ConfigurationError(
                f"lomo_backward was called with learning_rate={learning_rate!r} and {len(lomo)} LOMO optimizer(s): it "
                "needs both. Prepare a LOMO optimizer and write accelerator.backward(loss, learning_rate=...)."
            )
        for optimizer in lomo:
            optimizer.fused_backward(loss, learning_rate)  # type: ignore[attr-defined]

    def unscale_gradients(self, optimizer: Optimizers = None) -> None:
        """Divide the gradients of float16 training by the loss scale; once per step, however often it is called.

        Args:
            optimizer: One optimizer or several; all prepared ones if None.
        """
        if self.scaler is None:
            return
        given = self._optimizers if optimizer is None else optimizer
        for entry in [given] if isinstance(given, torch.optim.Optimizer) else given:
            inner = entry.optimizer if isinstance(entry, AcceleratedOptimizer) else entry
            if not is_unscaled(self.scaler, inner):
                self.scaler.unscale_(inner)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down so that their total norm is at most `max_norm`; returns the norm they had."""
        self.unscale_gradients()
        return self.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of the gradients to the range from `-clip_value` to `clip_value`.

        Raises:
            ConfigurationError: If the engine keeps gradients where they cannot be clipped one by one.
        """
        if not self.strategy.caps.clips_by_value:
            raise ConfigurationError(
                f"clip_grad_value_ was called under {self.strategy.name!r}, which cannot clip gradients one by one. "
                "Use clip_grad_norm_."
            )
        self.unscale_gradients()
        self.strategy.clip_grad_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that computes in the run's number format."""
        return self.precision.autocast(autocast_handler or self.autocast_handler)

    def set_trigger(self) -> None:
        """Raise this rank's flag; `check_trigger` then tells all ranks."""
        self.flag_tensor = torch.ones(1, device=current.runtime().device)

    def check_trigger(self) -> bool:
        """Return on all ranks whether any has raised its flag, and lower it. Every rank must call it."""
        flag = self.flag_tensor if self.flag_tensor is not None else torch.zeros(1, device=current.runtime().device)
        raised = bool(communicator().reduce(flag, "max").item() > 0)
        self.flag_tensor = None
        return raised

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile the block; with `output_trace_dir` every rank writes its trace there."""
        with run_profile(profile_handler or self.profile_handler or ProfileKwargs()) as profiler:
            yield profiler

    def breakpoint(self, rank: int = 0) -> None:
        """Stop all ranks and open the debugger on one of them, at the line after this; the others wait for it.

        Every rank must call it.

        Example:
            ```python
            if step == 100:
                accelerator.breakpoint()
            ```
        """
        debugger.stop(sys._getframe(1), rank)
