"""The forward pass of a pipeline: a batch cut into chunks, sent through the stages, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from accelerate._base.errors import AccelerateError, ConfigurationError
from accelerate.collectives.base import communicator
from accelerate.collectives.nested import ignorant_find_batch_size, pad_input_tensors, send_to_device
from accelerate.parallel.pipeline_tracing import ChunkSpec, StageModule, TensorSpec, TracedStages, flatten, trace
from accelerate.runtime import current
from accelerate.runtime.torch_private import gpipe_schedule, mend_first_messages


@dataclass(frozen=True)
class _ChunkedCall:
    """What the first process tells the others about a call, so that all of them trace and expect the same."""

    chunk: ChunkSpec | None = None
    rows: int = 0
    error: AccelerateError | None = None


def _for_each_chunk(tensor: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Return a tensor with a dimension of chunks in front, along which it is repeated without a copy."""
    return tensor.expand(num_chunks, *tensor.shape)


class _WholeInputs(nn.Module):
    """The first stage, for inputs that go whole into every chunk: they come with a dimension of chunks in front."""

    def __init__(self, stage: StageModule, per_chunk: Sequence[bool]) -> None:
        super().__init__()
        self.stage, self.per_chunk = stage, list(per_chunk)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = [tensor if cut else tensor[0] for tensor, cut in zip(tensors, self.per_chunk, strict=True)]
        result: tuple[torch.Tensor, ...] = self.stage(*chosen)
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
    _traced: dict[str, tuple[TracedStages, ScheduleGPipe]] = field(default_factory=dict)
    _placed: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)

    def trace_example(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Trace the model for one chunk of inputs, so that the first forward pass does not have to."""
        call, _ = self._describe(tuple(args), kwargs, num_chunks=1)
        if call.error is not None:
            raise call.error
        if call.chunk is not None:
            self._stages(call.chunk)

    @torch.no_grad()
    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], gather_output: bool) -> Any:
        """Run a batch of the first process; the last one gets the output, and all of them if asked."""
        ranks, device = communicator(), current.runtime().device
        last = ranks.world_size - 1
        call, tensors = _ChunkedCall(), list[torch.Tensor]()
        if ranks.rank == 0:
            call, tensors = self._describe(args, kwargs, self.num_chunks)
        shared = [call]
        ranks.broadcast_objects(shared)
        call = shared[0]
        if call.error is not None:
            raise call.error
        assert call.chunk is not None
        stages, schedule = self._stages(call.chunk)
        if ranks.rank == 0:
            schedule.step(*send_to_device(tensors, device))
            result: Any = ()
        else:
            result = schedule.step()
        outputs: Sequence[torch.Tensor] = (result,) if isinstance(result, torch.Tensor) else result or ()
        if not gather_output and ranks.rank != last:
            return None
        if gather_output:
            if ranks.rank != last:
                outputs = [
                    torch.empty((self.num_chunks * shape[0], *shape[1:]), dtype=dtype, device=device)
                    for shape, dtype in stages.passed[-1]
                ]
            outputs = [ranks.broadcast(tensor.contiguous(), last) for tensor in outputs]
        return stages.outputs.unflatten([output[: call.rows] for output in outputs])

    def _describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], num_chunks: int
    ) -> tuple[_ChunkedCall, list[torch.Tensor]]:
        """Return what this call looks like, and its tensors with a number of rows that the chunks divide."""
        try:
            tensors, structure = flatten((args, kwargs), "The input ")
            rows = find_batch_size(args, kwargs)
            if not rows:
                raise ConfigurationError(
                    f"The pipeline was called with {len(args)} arguments and the keywords {sorted(kwargs)!r}, in which "
                    "no tensor has rows to cut into chunks. Pass a batch with one row or more."
                )
        except AccelerateError as error:
            return _ChunkedCall(error=error), []
        is_cut = tuple(tensor.dim() > 0 and tensor.shape[0] == rows for tensor in tensors)
        specs, inputs = list[TensorSpec](), list[torch.Tensor]()
        for tensor, cut in zip(pad_input_tensors(tensors, rows, num_chunks), is_cut, strict=True):
            shape = tuple(tensor.shape)
            specs.append(((shape[0] // num_chunks, *shape[1:]) if cut else shape, tensor.dtype))
            dense = tensor.contiguous()  # torch 2.9 refuses other strides than it was told of
            inputs.append(dense if cut else _for_each_chunk(dense, num_chunks))
        chunk = ChunkSpec(tuple(specs), structure, -(-rows // num_chunks), is_cut, self.model.training)
        return _ChunkedCall(chunk, rows), inputs

    def _stages(self, chunk: ChunkSpec) -> tuple[TracedStages, ScheduleGPipe]:
        """Return the stages for one shape of chunk, traced when it first comes."""
        if chunk.key not in self._traced:
            replaced = self.model.__dict__.pop("forward", None)
            if getattr(self.forward, "__func__", None) is not type(self.model).forward:
                self.model.forward = self.forward  # the instance had one of its own
            try:
                stages = trace(self.model, self.points, chunk)
            finally:
                self.model.__dict__.pop("forward", None)
                if replaced is not None:
                    self.model.__dict__["forward"] = replaced
            self._check_outputs(stages, chunk.rows)
            self._traced[chunk.key] = stages, self._schedule(stages, chunk.cut)
        return self._traced[chunk.key]

    def _check_outputs(self, stages: TracedStages, rows: int) -> None:
        """Refuse outputs that cannot be put together from chunks, on all processes alike."""
        without_rows = [shape for shape, _ in stages.passed[-1] if shape[:1] != (rows,)]
        if without_rows:
            raise ConfigurationError(
                f"{type(self.model).__name__} gives outputs of the shapes {without_rows!r} for a chunk of {rows} rows, "
                "and what has no row for each sample, such as a loss, cannot be put together from chunks. Leave it out "
                "of the outputs: do not pass labels."
            )

    def _schedule(self, stages: TracedStages, per_chunk: Sequence[bool]) -> ScheduleGPipe:
        rank, device = communicator().rank, current.runtime().device
        module: nn.Module = stages.modules[rank]
        self._place(module, device)
        before, after = (
            [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in stages.passed[index]]
            for index in (rank, rank + 1)
        )
        if rank == 0:
            module = _WholeInputs(stages.modules[0], per_chunk)
            before = [
                tensor if cut else _for_each_chunk(tensor, self.num_chunks)[:1]
                for tensor, cut in zip(before, per_chunk, strict=True)
            ]
        stage = PipelineStage(
            module, rank, len(stages.modules), device, input_args=tuple(before), output_args=tuple(after)
        )
        mend_first_messages(stage)
        return gpipe_schedule(stage, self.num_chunks)

    def _place(self, stage: nn.Module, device: torch.device) -> None:
        """Bring the weights and constants of a stage to its device, and leave the model where it is for other traces."""
        for module in stage.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device != device:
                    if id(parameter) not in self._placed:  # all traces share one copy
                        copied = nn.Parameter(parameter.detach().to(device), requires_grad=False)
                        self._placed[id(parameter)] = parameter, copied
                    module._parameters[name] = self._placed[id(parameter)][1]
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
            if isinstance(module, torch.fx.GraphModule):
                _create_tensors_on(module, device)


def find_batch_size(args: Any, kwargs: Any) -> int | None:
    """Return the first batch size found among the arguments, then among the keyword arguments."""
    for value in (*args, *(kwargs or {}).values()):
        found = ignorant_find_batch_size(value)
        if found is not None:
            return found
    return None


def _create_tensors_on(module: torch.fx.GraphModule, device: torch.device) -> None:
    """Make tensors that a traced stage creates itself appear on its device instead of the one it was traced on."""
    changed = False
    for node in module.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device) and node.kwargs["device"] != device:
            node.update_kwarg("device", device)
            changed = True
    if changed:
        module.recompile()
