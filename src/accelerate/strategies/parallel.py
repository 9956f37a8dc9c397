"""Model parallelism without sharding: layers split over ranks, sequences cut, or stages of a pipeline, with replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from accelerate._base.enums import DistributedType, MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.checkpointing.parts import Part, Prepared
from accelerate.collectives.torch_dist import TorchDistCommunicator
from accelerate.parallel.mesh import averaging_group, axis_group
from accelerate.parallel.pipeline_training import PipelineStage, check_parts
from accelerate.parallel.tensor import model_has_dtensor, plan_of, tensor_parallel_step
from accelerate.parallel.unwrap import extract_model_from_parallel, plain_name
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime.current import Runtime
from accelerate.runtime.torch_private import after_backward
from accelerate.strategies import tools
from accelerate.strategies.base import Capabilities, EngineRequest, Step, Strategy, StrategyContext
from accelerate.strategies.broadcast_weights import equal_weights_step
from accelerate.strategies.sharded_state import sharded_parts

# Large enough to use the network well, small enough to be no second copy of a big model's gradients.
BUCKET_BYTES = 25 * 2**20
AVERAGER = "_gradient_averager"
"""The attribute of a model that holds what averages its gradients."""


class ParallelStrategy(Strategy):
    """Tensor, context and pipeline parallelism by torch, and replicas of all that; weights are not sharded."""

    name: ClassVar[str] = "parallel"
    caps: ClassVar[Capabilities] = Capabilities(holds_back_gradients=True)

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        # The registry selects this strategy for a layout, on several processes.
        assert context.parallelism is not None
        self.layout = context.parallelism
        self.mesh = self.layout.device_mesh
        self.stages = axis_group(self.mesh, MeshAxis.PP)
        if isinstance(self.precision.scaler, SharedGradScaler):
            # A rank sees the overflow of its own part only.
            self.precision.scaler.agree_on_overflow = True
        self._moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        """Parameters in place of those that a move to the device replaced."""
        if self.layout.pp_enabled:
            check_pipeline(self.layout, self.precision.scaler is not None)

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take every run whose ranks work together on one model."""
        layout = request.parallelism
        if layout is None or not runtime.is_distributed:
            return Choice(False, "no axes of parallelism were given")
        axes = ", ".join(layout.active_mesh_dims)
        return Choice(layout.non_data_parallel_size > 1, f"the axes in use are {axes or 'none'}")

    @classmethod
    def label(cls, runtime: Runtime) -> DistributedType:
        return runtime.backend.label

    def check_model(self, model: torch.nn.Module, *, evaluation: bool) -> None:
        """Refuse a model that cannot be laid out as asked."""
        if self.layout.pp_enabled:
            check_parts(model, self.layout.sizes[MeshAxis.PP])
        if self.layout.tp_enabled and self.layout.tp_handler.plan is None and not model_has_dtensor(model):
            plan_of(model)

    def steps(self, *, place: bool, evaluation: bool) -> tuple[Step, ...]:
        """Split layers first: autocast, compilers and replicas then see the layers that this rank has.

        Which layers a number format replaces is decided on the whole model.
        """
        rest: tuple[Step, ...] = (self.precision.wrap_forward, self.compile_blocks, self.compile_whole)
        if self.layout.pp_enabled:
            split: Step | None = self.make_stage
            rest = ()  # done to the layers inside of the stage
        else:
            handler = self.layout.tp_handler
            split = tensor_parallel_step(self.mesh, handler.plan if handler is not None else None)
        convert, wrap = (None, None) if evaluation else (self.convert, self.wrap)
        chain = (convert, self.place if place else None, split, equal_weights_step(self.mesh), wrap, *rest)
        return tuple(step for step in chain if step is not None)

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device, and note the parameters that are others there."""
        before = list(model.parameters())
        placed = super().place(model)
        pairs = zip(before, placed.parameters(), strict=True)
        self._moved.update((old, new) for old, new in pairs if old is not new)
        return placed

    def make_stage(self, model: torch.nn.Module) -> torch.nn.Module:
        """Keep the layers of this rank's stage."""

        def prepare(stage: torch.nn.Module) -> torch.nn.Module:
            return self.compile_whole(self.compile_blocks(self.precision.wrap_forward(stage)))

        handler = self.layout.pp_handler
        return PipelineStage(
            model, self.mesh[MeshAxis.PP.value], handler.schedule, handler.num_microbatches, prepare=prepare
        )

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Average gradients over the ranks that hold the same part of the model."""
        group = averaging_group(self.mesh)
        if group is not None and any(parameter.requires_grad for parameter in model.parameters()):
            # On the model, so that both are freed together.
            model.__dict__[AVERAGER] = GradientAverager(
                model.parameters(), TorchDistCommunicator(group, self.runtime.device).average
            )
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return suspended(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().prepare_optimizer(optimizer)
        tools.update_one_by_one(optimizer)

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | float) -> None:
        tools.scale_gradients(parameters, factor)

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        return tools.clip_grad_norm(parameters, max_norm, norm_type, self.runtime.device, stages=self.stages)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        tools.clip_grad_value(parameters, clip_value)

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the full gradients of this rank's data; ranks that share a layer bring its gradient together."""
        return {name: tools.full(gradient) for name, gradient in super().open_gradients(model).items()}

    def set_open_gradients(self, model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        own = {name: tools.split_like(gradients[name], parameters[name]) for name in parameters if name in gradients}
        super().set_open_gradients(model, own)

    def replaced(
        self, before: Sequence[torch.nn.Parameter], after: Sequence[torch.nn.Parameter]
    ) -> dict[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Return the parameters in place of split ones; None for those of other stages."""
        if self.stages is None:
            return super().replaced(before, after)
        kept = {id(parameter) for parameter in after}
        now = {parameter: self._moved.pop(parameter, parameter) for parameter in before}
        return {
            old: new if id(new) in kept else None for old, new in now.items() if new is not old or id(old) not in kept
        }

    def full_state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights on the main process, brought together from the ranks; nothing on the others."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        keep = self.runtime.rank == 0
        if self.stages is None:
            return tools.gather_full(inner.state_dict(), keep=keep)
        own = {name: value.detach().cpu() for name, value in inner.state_dict().items()}
        first = dist.get_process_group_ranks(self.stages)[0]
        received: list[Any] | None = [None] * self.stages.size() if self.runtime.rank == first else None
        dist.gather_object(own, received, dst=first, group=self.stages)
        return {name: value for part in received or () for name, value in part.items()} if keep else {}

    def weight_parts(self, prepared: Prepared) -> list[Part]:
        """Return parts of models and optimizers that all ranks write together, so that any layout can read them."""
        return sharded_parts(prepared, stages=self.stages)


def check_pipeline(layout: ParallelismConfig, scales: bool) -> None:
    """Refuse what cannot be combined with stages.

    Raises:
        ConfigurationError: If other axes than replicas are in use, or losses are scaled.
    """
    combined = (MeshAxis.PP, MeshAxis.DP_REPLICATE)
    others = [f"{axis}_size={size}" for axis, size in layout.sizes.items() if size > 1 and axis not in combined]
    if others:
        raise ConfigurationError(
            f"pp_size={layout.pp_size} was given with {', '.join(others)}, but stages are combined with replicas only. "
            "Leave the others at 1 and set dp_replicate_size, or set pp_size=1."
        )
    if scales:
        raise ConfigurationError(
            f"pp_size={layout.pp_size} was given with mixed_precision='fp16': a pipeline computes gradients before the "
            "loss can be scaled. Use mixed_precision='bf16'."
        )


def suspended(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which the gradients of a model are not averaged, if anything averages them."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    averager: GradientAverager | None = getattr(inner, AVERAGER, None)
    return averager.no_sync() if averager is not None else nullcontext()


class GradientAverager:
    """Average gradients over ranks, at the end of each backward pass.

    Args:
        parameters: The parameters of a model that are trained on all of these ranks.
        average: Replaces tensors by their means over the ranks that hold the same part of the model.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], average: Callable[[list[torch.Tensor]], None]) -> None:
        self.average = average
        self.is_suspended = False
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._is_queued = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._queue_exchange)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients to this rank; the first pass after this sends their sum."""
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before

    def _queue_exchange(self, parameter: torch.Tensor) -> None:
        if not self.is_suspended and not self._is_queued:
            self._is_queued = True
            after_backward(self._exchange)

    def _exchange(self) -> None:
        self._is_queued = False
        gradients = [tools.local(entry.grad) for entry in self._parameters if entry.grad is not None]
        with torch.no_grad():
            for bucket in _buckets(gradients):
                self.average(bucket)


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut a list into runs of one dtype and bounded size."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
