"""How a batch goes through a model and back where torch computes gradients: on the CPU.

A batch that is one part goes through as in any loop: its loss has a graph. A batch in several parts goes forward and back
part by part, so that the activations of one are in memory at a time; its loss then knows its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from accelerate._base.errors import UsageError
from accelerate.collectives.torch_dist import TorchDistCommunicator
from accelerate.parallel.pipeline_training import KnownGradients
from accelerate.runtime.gradient_clock import GradientState
from accelerate.strategies.megatron.device_parts import summed_over_ranks
from accelerate.strategies.parallel import GradientAverager

Batch = Mapping[str, Any]
ForwardStep = Callable[[Iterator[Batch], torch.nn.Module], tuple[Any, Callable[[Any], tuple[Any, ...]]]]


@dataclass
class Outcome:
    """What came of a batch: the loss, if there were labels, and what else the step reports."""

    loss: torch.Tensor | None
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PartLoss:
    """The loss of one part of a batch.

    Args:
        value: A mean, or a sum of so many items.
        count: The items of a sum; None for a mean.
    """

    value: torch.Tensor
    count: torch.Tensor | None = None

    @property
    def mean(self) -> torch.Tensor:
        """Return the mean over this part."""
        return self.value if self.count is None else self.value / self.count.clamp(min=1)


def _run(step: ForwardStep, batch: Batch, module: torch.nn.Module) -> tuple[PartLoss | None, dict[str, Any]]:
    output, loss_of = step(iter([batch]), module)
    *found, report = loss_of(output)
    return (None if found[0] is None else PartLoss(*found)), dict(report)


class TorchPasses:
    """Run a model on batches, and average gradients over its replicas.

    Args:
        module: What Megatron built.
        replicas: The ranks that hold the same part of it.
        layer: The ranks that split each layer.
        per_token: Every item that counts has one weight in all replicas and parts, instead of every replica.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        replicas: dist.ProcessGroup,
        layer: dist.ProcessGroup,
        *,
        per_token: bool,
        autocast: torch.dtype | None,
    ) -> None:
        self.module = module
        self.replicas = replicas
        self.per_token = per_token
        self.autocast = autocast
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._in_parts = False
        self._clock = GradientState()
        self._averager: GradientAverager | None = None
        if replicas.size() > 1 and self._parameters:
            average = TorchDistCommunicator(replicas, self._parameters[0].device).average
            self._averager = GradientAverager(module.parameters(), average)
        if layer.size() > 1:
            for parameter in summed_over_ranks(module):
                if parameter.requires_grad:
                    parameter.register_hook(self._summing(layer))

    def _summing(self, group: dist.ProcessGroup) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            if self._in_parts:
                return None  # summed once, when the gradients of all parts are handed on
            total = gradient.clone()
            dist.all_reduce(total, group=group)
            return total

        return hook

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on this rank."""
        return self._averager.no_sync() if self._averager is not None else _nothing()

    def run(self, step: ForwardStep, batches: Sequence[Batch], *, trains: bool) -> Outcome:
        """Return the loss of a batch, averaged over replicas, and what the step reports.

        Args:
            batches: The parts of the batch.
            trains: Gradients follow.
        """
        if trains and len(batches) > 1:
            return self._train_in_parts(step, batches)
        with self._computing():
            found = [_run(step, batch, self.module) for batch in batches]
        losses = [loss for loss, _ in found if loss is not None]
        report = joined_reports([part for _, part in found])
        if not losses:
            return Outcome(None, report)
        shown, total = self._shown(losses)
        if not trains:
            return Outcome(shown, report)
        loss = losses[0].mean if total is None else losses[0].value * (self.replicas.size() / total)
        # The value is that of all replicas, and the gradients are those of this one.
        return Outcome(loss + (shown - loss).detach(), report)

    def _train_in_parts(self, step: ForwardStep, batches: Sequence[Batch]) -> Outcome:
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        losses, reports = [], []
        try:
            self._in_parts = True
            with self.no_sync():
                for batch in batches:
                    with self._computing():
                        loss, report = _run(step, batch, self.module)
                    if loss is None:
                        raise UsageError(
                            f"A batch without labels came in {len(batches)} parts, whose gradients are computed with their losses. "
                            "Add 'labels', call model.eval() first, or write MegatronLMPlugin(num_micro_batches=1)."
                        )
                    is_sum = self._sums() and loss.count is not None
                    (loss.value if is_sum else loss.mean / len(batches)).backward()
                    losses.append(PartLoss(loss.value.detach(), loss.count))
                    reports.append(report)
            gradients = [parameter.grad for parameter in self._parameters]
        finally:
            self._in_parts = False
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient
        shown, total = self._shown(losses)
        if total is not None:
            torch._foreach_mul_([entry for entry in gradients if entry is not None], self.replicas.size() / total)
        loss = KnownGradients.apply(shown, gradients, *self._parameters)  # type: ignore[no-untyped-call]
        return Outcome(loss, joined_reports(reports))

    def _shown(self, losses: Sequence[PartLoss]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss of all replicas, and by how many items sums are divided; None for means of means."""
        counts = [loss.count for loss in losses if loss.count is not None]
        if self._sums() and len(counts) == len(losses):
            pair = torch.stack([sum(loss.value.detach().float() for loss in losses), sum(counts).float()])  # type: ignore[union-attr, list-item]
            dist.all_reduce(pair, group=self.replicas)
            total = pair[1].clamp(min=1)
            return pair[0] / total, total
        mean = torch.stack([loss.mean.detach().float() for loss in losses]).mean()
        dist.all_reduce(mean, group=self.replicas)
        return mean / self.replicas.size(), None

    def _sums(self) -> bool:
        """Return whether items are weighed; where batches have a place in a global batch, the loop weighs those."""
        return self.per_token and weighs_items(self._clock)

    def _computing(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return _nothing()
        return torch.autocast("cpu", self.autocast)


def weighs_items(clock: GradientState) -> bool:
    """Return whether losses are weighed by their items; in a global batch the loop weighs batches by their rows."""
    loader = clock.active_dataloader
    return loader is None or loader.microbatch is None


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def joined_reports(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the reports of all parts as one: rows one after another."""
    first = reports[0]
    if len(reports) == 1:
        return first
    rows = {name for name, value in first.items() if isinstance(value, torch.Tensor) and value.dim() > 0}
    return {
        name: torch.cat([report[name] for report in reports]) if name in rows else [report[name] for report in reports]
        for name in first
    }
