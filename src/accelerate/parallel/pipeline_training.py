"""Training in a pipeline: every rank of a group holds some layers, and batches go forward and back in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.imports import is_torch_version
from accelerate.runtime.torch_private import gpipe_schedule, mend_first_messages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# torch 2.9 returns the outputs in any case.
_WITHOUT_OUTPUTS = {} if is_torch_version("<", "2.10") else {"return_outputs": False}


@runtime_checkable
class Pipelined(Protocol):
    """A model that can be cut into stages.

    Called with inputs and targets it returns the mean loss, as `pipeline_loss` does for what the last part returns;
    called with inputs alone, the outputs.
    """

    def pipeline_parts(self) -> Sequence[torch.nn.Module]:
        """Return the parts of the model in the order of the forward pass, each called with what the last returned."""

    def pipeline_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""


def stage_bounds(parts: Sequence[torch.nn.Module], stages: int) -> list[tuple[int, int]]:
    """Return begin and end of each stage, so that the largest number of parameters of a stage is as small as it can be."""
    weights = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    if len(parts) < stages:
        raise ConfigurationError(
            f"A model of {len(parts)} parts cannot be cut into pp_size={stages} stages. Return more parts from "
            f"pipeline_parts(), or set pp_size to {len(parts)} or less."
        )
    # best[k][n]: the largest stage when the first n parts make k stages, and where the last of them begins.
    best = [[(float("inf"), 0)] * (len(parts) + 1) for _ in range(stages + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, stages + 1):
        for end in range(stage, len(parts) + 1):
            best[stage][end] = min(
                (max(best[stage - 1][begin][0], float(sum(weights[begin:end]))), begin)
                for begin in range(stage - 1, end)
            )
    bounds, end = [], len(parts)
    for stage in range(stages, 0, -1):
        begin = best[stage][end][1]
        bounds.append((begin, end))
        end = begin
    return bounds[::-1]


def check_parts(model: torch.nn.Module, stages: int) -> Sequence[torch.nn.Module]:
    """Return the parts of a model.

    Raises:
        ConfigurationError: If the model cannot be cut into stages.
    """
    if not isinstance(model, Pipelined):
        raise ConfigurationError(
            f"{type(model).__name__} says nothing of how it is cut into pp_size={stages} stages. Give it the methods "
            "pipeline_parts(), which returns its parts in order, and pipeline_loss(outputs, targets); or set pp_size=1."
        )
    parts = list(model.pipeline_parts())
    owner: dict[int, int] = {}
    for stage, (begin, end) in enumerate(stage_bounds(parts, stages)):
        for part in parts[begin:end]:
            for name, parameter in part.named_parameters():
                if owner.setdefault(id(parameter), stage) != stage:
                    raise ConfigurationError(
                        f"The parameter {name!r} of {type(model).__name__} is used by stages {owner[id(parameter)]} and "
                        f"{stage}, which live on different ranks. Give each its own (tie_weights=False or the like), or "
                        "set pp_size=1."
                    )
    held = {id(parameter) for part in parts for parameter in part.parameters()}
    left = next((name for name, parameter in model.named_parameters() if id(parameter) not in held), None)
    if left is not None:
        raise ConfigurationError(
            f"The parameter {left!r} of {type(model).__name__} is in none of the parts that pipeline_parts() returns, so "
            "no stage would train it. Put it into a part."
        )
    return parts


class KnownGradients(torch.autograd.Function):
    """A loss whose gradients were computed with it: a backward pass hands them on."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor | None], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(None if entry is None else entry * scale for entry in ctx.gradients)


class PipelineStage(torch.nn.Module):
    """One rank's layers of a model, called as the model is.

    With targets the whole batch goes forward and backward through all stages, in the order of the schedule; the loss
    that is returned, the same on all ranks, knows its gradients, so the loop goes on as with a whole model. Without
    targets the outputs of the last stage are returned on all ranks.

    Args:
        model: The model to cut; its other parts are released.
        mesh: The axis of pipeline parallelism alone.
        schedule: "1f1b" or "gpipe".
        num_microbatches: Parts of a batch; one a stage if None.
        prepare: What is done to this stage's layers: autocast, compilation.
    """

    stage: torch.nn.Module
    _loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: DeviceMesh,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        prepare: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    ) -> None:
        super().__init__()
        parts = check_parts(model, mesh.size())
        self.index, self.count = mesh.get_local_rank(), mesh.size()
        self.group = mesh.get_group()
        self.num_microbatches = num_microbatches or self.count
        self._schedule_name = schedule
        begin, end = stage_bounds(parts, self.count)[self.index]
        names = {id(module): name for name, module in model.named_modules()}
        own = parts[begin:end]
        for part in own:
            _add_at(self, names[id(part)], part)
        stage = torch.nn.Sequential(*own)
        for part in (*parts[:begin], *parts[end:]):
            part.to("meta")
        # Neither is a sub-module: the parts have their own names above, and the model holds those of other stages.
        self.__dict__["stage"] = prepare(stage) if prepare is not None else stage
        self.__dict__["_loss_of"] = model.pipeline_loss
        weight = next(stage.parameters())
        self._device = weight.device
        # All stages must expect one dtype, and only the last has the loss.
        self._loss_dtype = torch.promote_types(weight.dtype, torch.float32)
        self._schedules: dict[Any, Any] = {}

    @property
    def is_last(self) -> bool:
        """Return whether this stage computes outputs and loss."""
        return self.index == self.count - 1

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean loss of a batch, or its outputs if there are no targets."""
        if inputs.shape[0] % self.num_microbatches:
            raise UsageError(
                f"A batch of {inputs.shape[0]} rows cannot be cut into num_microbatches={self.num_microbatches} equal parts, "
                "so their mean loss would not be that of the batch. Choose a batch size that it divides, with "
                "drop_last=True where the last batch is shorter."
            )
        inputs = inputs.contiguous()  # torch 2.9 refuses parts of rows
        if targets is None:
            return self._to_all(self._pass_forward(inputs))
        loss = torch.zeros((), dtype=self._loss_dtype, device=self._device)
        if not (self.training and torch.is_grad_enabled()):
            outputs = self._pass_forward(inputs)
            if outputs is not None:
                loss += self._loss_of(outputs, targets).detach()
            return self._from_last(loss)
        losses: list[torch.Tensor] = []
        gradients = self._pass_both_ways(inputs, targets, losses)
        if losses:
            loss += torch.stack([entry.detach() for entry in losses]).mean()
        result: torch.Tensor = KnownGradients.apply(self._from_last(loss), gradients, *self.parameters())  # type: ignore[no-untyped-call]
        return result

    def _pass_both_ways(
        self, inputs: torch.Tensor, targets: torch.Tensor, losses: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Send a batch through all stages and back; return this stage's gradients, apart from those that are there."""
        schedule = self._schedule(inputs, trains=True)
        parameters = list(self.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            last = {"target": targets, "losses": losses, **_WITHOUT_OUTPUTS} if self.is_last else {}
            schedule.step(*([inputs] if self.index == 0 else []), **last)
            return [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _pass_forward(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Send a batch through all stages; return the outputs on the last."""
        with torch.no_grad():
            outputs: torch.Tensor | None = self._schedule(inputs, trains=False).eval(
                *([inputs] if self.index == 0 else [])
            )
        return outputs

    def _from_last(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, dist.get_process_group_ranks(self.group)[-1], group=self.group)
        return tensor

    def _to_all(self, outputs: torch.Tensor | None) -> torch.Tensor:
        """Give all ranks the outputs of the last stage."""
        described: list[Any] = [None if outputs is None else (tuple(outputs.shape), outputs.dtype)]
        dist.broadcast_object_list(described, dist.get_process_group_ranks(self.group)[-1], group=self.group)
        shape, dtype = described[0]
        return self._from_last(
            torch.empty(shape, dtype=dtype, device=self._device) if outputs is None else outputs.contiguous()
        )

    def _schedule(self, inputs: torch.Tensor, *, trains: bool) -> Any:
        """Return the schedule for batches of one shape: torch fixes the sizes of its messages at the first batch."""
        from torch.distributed import pipelining

        key = tuple(inputs.shape), inputs.dtype, trains
        if key not in self._schedules:
            stage = pipelining.PipelineStage(self.stage, self.index, self.count, self._device, group=self.group)
            mend_first_messages(stage)
            kinds: dict[str, Callable[..., Any]] = {"1f1b": pipelining.Schedule1F1B, "gpipe": gpipe_schedule}
            # Forward passes alone have no turns to take.
            kind = kinds[self._schedule_name] if trains else gpipe_schedule
            loss = self._mean_loss if trains else None
            self._schedules[key] = kind(stage, self.num_microbatches, loss_fn=loss, scale_grads=False)
        return self._schedules[key]

    def _mean_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self._loss_of(outputs, targets)
        # The gradients of the parts are summed; those of a mean over equal parts are their mean.
        mean: torch.Tensor = _MeanOfParts.apply(loss, self.num_microbatches)  # type: ignore[no-untyped-call]
        return mean


def _add_at(root: torch.nn.Module, name: str, part: torch.nn.Module) -> None:
    """Put a part of a model under the name that it has there, so that a stage's weights keep their names."""
    *path, leaf = name.split(".")
    for step in path:
        if not hasattr(root, step):
            root.add_module(step, torch.nn.Module())
        root = root.get_submodule(step)
    root.add_module(leaf, part)


class _MeanOfParts(torch.autograd.Function):
    """Pass a loss through, and the part of its gradient that a mean over several losses takes."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.count, None
