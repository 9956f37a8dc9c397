"""The training step: accumulation windows, backward passes, and what is done to gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.helpers import warn_once
from accelerate.collectives.base import communicator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import Progress
from accelerate.runtime.torch_private import is_unscaled, rearm_reducer
from accelerate.session.prepared import PreparedObjects
from accelerate.session.setup import Run
from accelerate.strategies.base import Strategy

Items = float | torch.Tensor | None
"""How many items a summed loss is over; None for a loss that is a mean."""


class AccumulationWindow:
    """Divide the gradients of a window whose length or number of items is known only when it closes.

    Losses are added up as they come. At a backward pass of the closing micro-batch the divisor is known as far as items
    were named: the gradients that are there are brought to it, and so is the loss before its backward pass. So the
    gradients are final as soon as the last backward pass returns.
    """

    _COUNTS: ClassVar[dict[Any, Any]] = {
        "length": int,
        "_items": torch.Tensor | None,
        "_unit": float | None,
        "_factor": torch.Tensor | float | None,
        "_backwards": int,
    }
    """What is saved of an open window, and of what types it is."""

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
            return {name: getattr(self, name) for name in self._COUNTS}
        return {"_unit": self._unit} if self._unit is not None else {}

    def accepts(self, state_dict: object) -> bool:
        """Return whether something that was read can be the counts of a window."""
        return isinstance(state_dict, dict) and all(
            name in self._COUNTS and isinstance(count, self._COUNTS[name]) for name, count in state_dict.items()
        )

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

    def count_mean(self) -> None:
        """Count a backward pass of a loss that is a mean.

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
        num_items: Items,
        **kwargs: Any,
    ) -> None:
        """Compute gradients of `loss` so that the closed window is divided by its own length or by its items."""
        self._refuse_mixture(num_items)
        if num_items is None:
            loss = loss / num_steps
        else:
            items = _count_of(loss, num_items)
            if self._unit is None:
                # A divisor near the final one, agreed once by all ranks, keeps losses small until that is known.
                self._unit = max(float(communicator().reduce(items, "max")) * num_steps, 1.0)
            loss = loss / self._unit
            self._items = items if self._items is None else self._items + items
        rescale_after: torch.Tensor | float | None = None
        if closes and strategy.caps.hides_open_gradients:
            loss, rescale_after = self._divide_after(loss, num_steps)
        elif closes:
            loss = self._divide_now(strategy, loss, parameters, num_steps)
        self._backwards += 1
        strategy.backward(loss, **kwargs)
        if rescale_after is not None:
            strategy.scale_gradients(parameters, rescale_after)

    def _refuse_mixture(self, num_items: Items) -> None:
        if self._backwards > 0 and (self._items is not None) != (num_items is not None):
            raise UsageError(
                "backward(num_items=...) was given for some micro-batches of an accumulation window and not for others, "
                "so there is no common divisor. Pass num_items to every backward() of the window, or to none."
            )

    def _divide_now(
        self, strategy: Strategy, loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter], num_steps: int
    ) -> torch.Tensor:
        """Bring the gradients that are there to the divisor known now, and return the loss at that divisor."""
        before = self._factor
        if before is None or self._items is not None:
            self._factor = self._closing_factor(num_steps)
            if self._factor is not None and self._backwards > 0:
                strategy.scale_gradients(parameters, self._factor if before is None else self._factor / before)
        return loss if self._factor is None else loss * self._factor

    def _divide_after(self, loss: torch.Tensor, num_steps: int) -> tuple[torch.Tensor, torch.Tensor | float | None]:
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


class GradientStepper:
    """Own the accumulation window of a run: when it closes, what its gradients are divided by, how they are clipped."""

    def __init__(self, run: Run, objects: PreparedObjects, progress: Progress) -> None:
        self.run = run
        self.objects = objects
        self.progress = progress
        self.clock = run.clock
        self.strategy = run.strategy
        self.step = 0
        """Micro-batches since the last end of a loader."""
        self.window = AccumulationWindow()

    def restart(self) -> None:
        """Count from the beginning."""
        self.step = 0
        self.window = AccumulationWindow()

    def accumulate(self, models: tuple[torch.nn.Module, ...]) -> Accumulate:
        """Return the context of one micro-batch."""
        return Accumulate(self, models)

    def advance(self) -> None:
        """Advance the clock by one micro-batch and decide whether it closes the window."""
        clock = self.clock
        loader = clock.active_dataloader
        microbatch = (
            loader.microbatch if self.run.options.global_batch_size is not None and loader is not None else None
        )
        if microbatch is not None:
            self.step += 1
            clock.sync_gradients = microbatch.closes_window
        elif loader is not None and loader.end_of_dataloader and clock.sync_with_dataloader:
            self.step = 0
            clock.sync_gradients = True
        else:
            self.step += 1
            clock.sync_gradients = self.step % clock.num_steps == 0
        self.window.advance(clock.sync_gradients)
        if not clock.sync_gradients:
            self.progress.follow(loader)  # the update of a complete window does it by itself

    def backward(self, loss: torch.Tensor, num_items: Items, **kwargs: Any) -> None:
        """Compute gradients of `loss`, divided by what the window calls for."""
        clock, window = self.clock, self.window
        learning_rate, num_steps = None, clock.num_steps
        if kwargs:
            learning_rate = kwargs.pop("learning_rate", None)
            if not kwargs.pop("scale_wrt_gas", True):  # as DeepSpeed calls it: the loss is divided already
                num_steps = 1
        if self.objects.has_lomo:
            self.lomo_backward(loss / num_steps, learning_rate)
            return
        weight = self._microbatch_weight() if self.run.options.global_batch_size is not None else None
        if num_items is None and (weight is not None or num_steps == 1 or not clock.normalizes_by_window):
            if window.length:
                window.count_mean()
            if weight is not None:
                loss = loss * weight
            elif num_steps != 1:
                loss = loss / num_steps
            self.strategy.backward(loss, **kwargs)
            return
        if weight == 0.0:
            loss, num_items = loss * 0.0, 0.0
        closes = clock.sync_gradients
        parameters = self.objects.parameters()
        window.backward(
            self.strategy, loss, parameters, num_steps=num_steps, closes=closes, num_items=num_items, **kwargs
        )
        if window.length == 0 and closes:
            window.restart()  # a loop without accumulate(): every backward pass is a batch of its own

    def _microbatch_weight(self) -> float | None:
        """Return the weight of the micro-batch at hand in its global batch, None outside of loops."""
        loader = self.clock.active_dataloader
        microbatch = loader.microbatch if loader is not None else None
        if microbatch is None:
            return None
        if self.clock.sync_gradients and not microbatch.closes_window:
            raise UsageError(
                f"backward() was called for a part of a global batch of {microbatch.samples} samples outside of "
                "accumulate(), so the optimizer would step before the rest. Write `with accelerator.accumulate(model):` "
                "around the step."
            )
        return float(microbatch.weight)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float | None) -> None:
        """Run the backward pass of a LOMO optimizer, which updates the weights on the way."""
        lomo: list[Any] = [entry.optimizer for entry in self.objects.optimizers if entry.fused_backward]
        if not lomo or learning_rate is None:
            raise ConfigurationError(
                f"lomo_backward was called with learning_rate={learning_rate!r} and {len(lomo)} LOMO optimizer(s): it "
                "needs both. Prepare a LOMO optimizer and write accelerator.backward(loss, learning_rate=...)."
            )
        for optimizer in lomo:
            optimizer.fused_backward(loss, learning_rate)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None) -> None:
        """Divide the gradients of float16 training by the loss scale; once per step, however often it is called."""
        scaler = self.run.precision.scaler
        if scaler is None:
            return
        given = self.objects.optimizers if optimizer is None else optimizer
        for entry in [given] if isinstance(given, torch.optim.Optimizer) else given:
            inner = entry.optimizer if isinstance(entry, AcceleratedOptimizer) else entry
            if not is_unscaled(scaler, inner):
                scaler.unscale_(inner)

    def clip_grad_value(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of the gradients."""
        if not self.strategy.caps.clips_by_value:
            raise ConfigurationError(
                f"clip_grad_value_ was called under {self.strategy.name!r}, which cannot clip gradients one by one. "
                "Use clip_grad_norm_."
            )
        self.unscale_gradients(None)
        self.strategy.clip_grad_value(parameters, clip_value)

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
        """Let ranks that run out of batches early wait for the others."""
        if not self.strategy.caps.joinable:
            if self.run.runtime.is_distributed:
                warn_once(f"join_uneven_inputs does nothing under the strategy {self.strategy.name!r}.")
            yield
            return
        changed: list[tuple[Any, bool]] = []
        if even_batches is not None:
            for loader in self.objects.loaders:
                sampler: Any = getattr(loader, "batch_sampler", None)
                if hasattr(sampler, "even_batches"):
                    changed.append((sampler, sampler.even_batches))
                    sampler.even_batches = even_batches
                else:
                    warn_once(
                        f"join_uneven_inputs(even_batches={even_batches!r}) does not reach a loader without a batch "
                        "sampler (an iterable dataset): it keeps its own way."
                    )
        enabled = not (even_batches if even_batches is not None else self.run.options.dataloader_config.even_batches)
        try:
            with Join(list(joinables), enable=enabled, throw_on_early_termination=False):
                yield
            if enabled:
                # A rank that ran out of batches counts the updates that the others made without it.
                steps = torch.tensor([self.progress.step], device=self.run.runtime.device)
                self.progress.step = int(communicator().reduce(steps, "max").item())
        finally:
            for sampler, value in changed:
                sampler.even_batches = value


class Accumulate:
    """Advance the clock on entry, and hold back the exchange of gradients while a window is open.

    A plain class, because a training step enters it and a generator-based context manager costs several times more.
    """

    __slots__ = ("_entered", "_models", "_stepper")

    def __init__(self, stepper: GradientStepper, models: tuple[torch.nn.Module, ...]) -> None:
        self._stepper = stepper
        self._models = models
        self._entered: list[AbstractContextManager[Any]] | None = None

    def __enter__(self) -> None:
        stepper = self._stepper
        stepper.advance()
        clock, strategy = stepper.clock, stepper.strategy
        if clock.sync_gradients or not strategy.caps.holds_back_gradients or clock.sync_each_batch:
            return
        self._entered = []
        for model in self._models:
            context = strategy.no_sync(model)
            context.__enter__()
            self._entered.append(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._entered is not None:
            for context in reversed(self._entered):
                context.__exit__(kind, error, traceback)
            self._entered = None
        self._stepper.window.leave()


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
