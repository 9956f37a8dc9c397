"""The forward pass of a pipeline: a batch cut into chunks, sent through the stages, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from accelerate._base.errors import AccelerateError, ConfigurationError
from accelerate.collectives import communicator
from accelerate.collectives.nested import ignorant_find_batch_size, pad_input_tensors, send_to_device
from accelerate.parallel.pipeline.stages import ChunkForm, Segment, Spec, Stages, trace
from accelerate.parallel.pipeline.structure import take_apart
from accelerate.runtime import current


@dataclass(frozen=True)
class _Call:
    """What the first process tells the others about a call, so that all of them trace and expect the same."""

    form: ChunkForm | None = None
    rows: int = 0
    error: AccelerateError | None = None


class _WholeInputs(nn.Module):
    """The first stage, for inputs that go whole into every chunk: they come with a dimension of chunks in front."""

    def __init__(self, segment: Segment, per_chunk: Sequence[bool]) -> None:
        super().__init__()
        self.segment, self.per_chunk = segment, list(per_chunk)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = [tensor if cut else tensor[0] for tensor, cut in zip(tensors, self.per_chunk, strict=True)]
        result: tuple[torch.Tensor, ...] = self.segment(*chosen)
        return result


@dataclass
class Pipeline:
    """The stage of this process in a model that is cut before some modules.

    Args:
        forward: The forward pass of the whole model.
        num_chunks: How many chunks a batch is cut into.
    """

    model: nn.Module
    forward: Callable[..., Any]
    points: list[str]
    num_chunks: int
    _traced: dict[str, tuple[Stages, ScheduleGPipe]] = field(default_factory=dict)
    _placed: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    def learn(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Trace the model for one chunk of inputs, so that the first forward pass does not have to."""
        call, _ = self._describe(tuple(args), kwargs, num_chunks=1)
        if call.error is not None:
            raise call.error
        if call.form is not None:
            self._stages(call.form)

    @torch.no_grad()
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], gather_output: bool) -> Any:
        """Run a batch of the first process; the last one gets the output, and all of them if asked."""
        talk = communicator()
        call, tensors = _Call(), list[torch.Tensor]()
        if talk.rank == 0:
            call, tensors = self._describe(args, kwargs, self.num_chunks)
        shared = [call]
        talk.broadcast_objects(shared)
        call = shared[0]
        if call.error is not None:
            raise call.error
        assert call.form is not None
        stages, schedule = self._stages(call.form)
        merged = self._run(schedule, tensors)
        if not gather_output and talk.rank != talk.world_size - 1:
            return None
        outputs = self._outputs(stages, merged, gather_output)
        return stages.outputs.fill([output[: call.rows] for output in outputs])

    def _run(self, schedule: ScheduleGPipe, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if communicator().rank == 0:
            schedule.step(*send_to_device(list(tensors), current.runtime().device))
            return ()
        result = schedule.step()
        return (result,) if isinstance(result, torch.Tensor) else result or ()

    def _outputs(self, stages: Stages, merged: Sequence[torch.Tensor], gather_output: bool) -> Sequence[torch.Tensor]:
        if not gather_output:
            return merged
        talk, device = communicator(), current.runtime().device
        last = talk.world_size - 1
        if talk.rank != last:
            merged = [
                torch.empty((self.num_chunks * shape[0], *shape[1:]), dtype=dtype, device=device)
                for shape, dtype in stages.passed[-1]
            ]
        return [talk.broadcast(tensor.contiguous(), last) for tensor in merged]

    def _describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_chunks: int
    ) -> tuple[_Call, list[torch.Tensor]]:
        """Return what this call looks like, and its tensors with a number of rows that the chunks divide."""
        try:
            tensors, pattern = take_apart((args, kwargs), "The input ")
            rows = find_batch_size(args, kwargs)
            if not rows:
                raise ConfigurationError(
                    f"The pipeline was called with {len(args)} arguments and the keywords {sorted(kwargs)!r}, in which "
                    "no tensor has rows to cut into chunks. Pass a batch with one row or more."
                )
        except AccelerateError as error:
            return _Call(error=error), []
        cut = tuple(tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors)
        padded = pad_input_tensors(tensors, rows, num_chunks)
        specs = tuple(_spec(tensor, num_chunks if yes else 1) for tensor, yes in zip(padded, cut, strict=True))
        whole = [
            tensor if yes else tensor.expand(num_chunks, *tensor.shape) for tensor, yes in zip(padded, cut, strict=True)
        ]
        form = ChunkForm(specs, pattern, -(-rows // num_chunks), cut, self.model.training)
        return _Call(form, rows), whole

    def _stages(self, form: ChunkForm) -> tuple[Stages, ScheduleGPipe]:
        if form.key not in self._traced:
            stages = self._trace(form)
            self._traced[form.key] = stages, self._schedule(stages, form.cut)
        return self._traced[form.key]

    def _trace(self, form: ChunkForm) -> Stages:
        replaced = self.model.__dict__.pop("forward", None)
        if getattr(self.forward, "__func__", None) is not type(self.model).forward:
            self.model.forward = self.forward  # the instance had one of its own
        try:
            stages = trace(self.model, self.points, form)
        finally:
            self.model.__dict__.pop("forward", None)
            if replaced is not None:
                self.model.__dict__["forward"] = replaced
        _check_outputs(stages, type(self.model).__name__, form.rows)
        return stages

    def _schedule(self, stages: Stages, per_chunk: Sequence[bool]) -> ScheduleGPipe:
        rank, device = communicator().rank, current.runtime().device
        segment = stages.segments[rank]
        self._place(segment, device)
        before = [_empty(spec) for spec in stages.passed[rank]]
        module: nn.Module = segment
        if rank == 0:
            module = _WholeInputs(segment, per_chunk)
            before = [tensor if cut else tensor[None] for tensor, cut in zip(before, per_chunk, strict=True)]
        after = tuple(_empty(spec) for spec in stages.passed[rank + 1])
        stage = PipelineStage(module, rank, len(stages.segments), device, input_args=tuple(before), output_args=after)
        return ScheduleGPipe(stage, self.num_chunks)

    def _place(self, segment: nn.Module, device: torch.device) -> None:
        """Bring the weights and constants of a stage to its device, and leave the model where it is for other traces."""
        for module in segment.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device != device:
                    module._parameters[name] = self._copy_on(parameter, device)
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
            if isinstance(module, torch.fx.GraphModule):
                _compute_on(module, device)

    def _copy_on(self, parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Return the one copy of a parameter on the device, which all traces share."""
        if id(parameter) not in self._placed:
            self._placed[id(parameter)] = parameter, nn.Parameter(parameter.detach().to(device), requires_grad=False)
        return self._placed[id(parameter)][1]


def find_batch_size(args: Any, kwargs: Any) -> int | None:
    """Return the first batch size found among the arguments, then among the keyword arguments."""
    for value in (*args, *(kwargs or {}).values()):
        found = ignorant_find_batch_size(value)
        if found is not None:
            return found
    return None


def _compute_on(module: torch.fx.GraphModule, device: torch.device) -> None:
    """Make tensors that a traced stage creates itself appear on its device instead of the one it was traced on."""
    changed = False
    for node in module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device) and node.kwargs["device"] != device:
            node.update_kwarg("device", device)
            changed = True
    if changed:
        module.recompile()


def _spec(tensor: torch.Tensor, num_chunks: int) -> Spec:
    shape = tuple(tensor.shape)
    return ((shape[0] // num_chunks, *shape[1:]) if num_chunks > 1 else shape), tensor.dtype


def _empty(spec: Spec) -> torch.Tensor:
    shape, dtype = spec
    return torch.empty(shape, dtype=dtype, device="meta")


def _check_outputs(stages: Stages, name: str, rows: int) -> None:
    """Refuse outputs that cannot be put together from chunks, on all processes alike."""
    without_rows = [shape for shape, _ in stages.passed[-1] if shape[:1] != (rows,)]
    if without_rows:
        raise ConfigurationError(
            f"{name} gives outputs of the shapes {without_rows!r} for a chunk of {rows} rows, and what has no row for "
            "each sample, such as a loss, cannot be put together from chunks. Leave it out of the outputs: do not "
            "pass labels."
        )
