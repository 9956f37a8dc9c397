"""Model parallelism without sharding: layers split over ranks, sequences cut, or stages of a pipeline, with replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.checkpointing.parts import ModelPart, OptimizerPart, Part, Prepared
from accelerate.parallel.gradients import GradientMean, clip_grad_norm, local, scale_gradients, split_like, whole
from accelerate.parallel.mesh import averaging_group, axis_group
from accelerate.parallel.pipeline.training import PipelineStage, check_parts
from accelerate.parallel.state import gather_stages, gather_whole
from accelerate.parallel.steps import same_start_step, tensor_parallel_step
from accelerate.parallel.tensor import plan_of
from accelerate.parallel.unwrap import extract_model_from_parallel, plain_name
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime.runtime import Runtime
from accelerate.strategies.base import Capabilities, Step, Strategy, StrategyContext
from accelerate.strategies.fsdp.optimizer_state import load_optimizer_state
from accelerate.strategies.fsdp.originals import Originals
from accelerate.strategies.fsdp.parts import ShardedModelPart, ShardedOptimizerPart
from accelerate.strategies.fsdp.sharding import model_of
from accelerate.strategies.fsdp.state_files import SHARDED
from accelerate.strategies.request import EngineRequest

_MEAN = "_gradient_mean"


@dataclass
class _Files:
    """How models and optimizers are written: by all ranks together, so that any layout can read them."""

    state_dict_type: str = SHARDED


class StageOptimizerPart(ShardedOptimizerPart):
    """The optimizer of one stage of a pipeline, written together with those of the others."""

    def __init__(
        self, strategy: Any, optimizer: Any, model: torch.nn.Module, index: int, stages: dist.ProcessGroup
    ) -> None:
        super().__init__(strategy, optimizer, model, index)
        self.stages = stages

    def state(self) -> dict[str, Any]:
        """Return this stage's state, in groups that name the parameters of all stages."""
        state = super().state()
        own = [group["params"] for group in state["param_groups"]]
        found: list[Any] = [None] * self.stages.size()
        dist.all_gather_object(found, own, group=self.stages)
        for place, group in enumerate(state["param_groups"]):
            group["params"] = [name for stage in found for name in stage[place]]
        return state

    def restore(self, payload: Any) -> None:
        """Take this stage's part of a state."""
        load_optimizer_state(self.model, self.optimizer, payload, is_stage=True)


class ParallelStrategy(Strategy):
    """Tensor, context and pipeline parallelism by torch, and replicas of all that; weights are not sharded."""

    name: ClassVar[str] = "parallel"
    caps: ClassVar[Capabilities] = Capabilities(shards=True, holds_back_gradients=True)

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        layout = context.parallelism
        self.mesh = layout.device_mesh if layout is not None else None
        self.plugin = _Files()
        scaler = self.precision.scaler
        if isinstance(scaler, SharedGradScaler):
            # A rank sees the overflow of its own part only.
            scaler.agree_on_overflow = True
        if layout is not None and layout.pp_enabled:
            check_pipeline(layout, self.precision.scaler is not None)

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
        """Return the name of the hardware's regime, such as MULTI_GPU."""
        return runtime.backend.label

    def check_model(self, model: torch.nn.Module) -> None:
        """Refuse a model that cannot be laid out as asked."""
        layout = self.context.parallelism
        if layout is None:
            return
        if layout.pp_enabled:
            check_parts(model, layout.sizes["pp"])
        if layout.tp_enabled and layout.tp_handler.plan is None:
            from accelerate.parallel.describe import model_has_dtensor

            if not model_has_dtensor(model):
                plan_of(model)

    def steps(self, *, place: bool, evaluation: bool) -> tuple[Step, ...]:
        """Split layers first: autocast, compilers and replicas then see the layers that this rank has."""
        layout = self.context.parallelism
        if layout is not None and layout.pp_enabled:
            first: list[Step | None] = [self.place if place else None, self.make_stage]
            rest: list[Step] = []
        else:
            first = [self.place if place else None, tensor_parallel_step(self.mesh, self._plan())]
            rest = [self.precision.wrap_forward, self.compile_blocks, self.compile_whole]
        chain = [step for step in (*first, same_start_step(self.mesh)) if step is not None]
        return (*chain, *rest) if evaluation else (*chain, self.wrap, *rest)

    def _plan(self) -> Any:
        handler = self.context.parallelism.tp_handler if self.context.parallelism is not None else None
        return handler.plan if handler is not None else None

    def make_stage(self, model: torch.nn.Module) -> torch.nn.Module:
        """Keep the layers of this rank's stage."""
        layout = self.context.parallelism
        assert layout is not None
        assert self.mesh is not None
        handler = layout.pp_handler
        return PipelineStage(
            model, self.mesh["pp"], handler.schedule, handler.num_microbatches, prepare=self._prepare_stage
        )

    def _prepare_stage(self, stage: torch.nn.Module) -> torch.nn.Module:
        return self.compile_whole(self.compile_blocks(self.precision.wrap_forward(stage)))

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Average gradients over the ranks that hold the same part of the model."""
        group = averaging_group(self.mesh)
        if group is not None and any(parameter.requires_grad for parameter in model.parameters()):
            # On the model, so that both are let go together.
            model.__dict__[_MEAN] = GradientMean(model, group)
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients stay on their rank."""
        mean: GradientMean | None = getattr(extract_model_from_parallel(model, keep_torch_compile=False), _MEAN, None)
        return mean.hold() if mean is not None else nullcontext()

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | float) -> None:
        """Multiply the gradients that are there by `factor`."""
        scale_gradients(parameters, factor)

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip by the norm of the whole model, of which this rank holds a part."""
        return clip_grad_norm(parameters, max_norm, norm_type, axis_group(self.mesh, "pp"))

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit each element of this rank's part of the gradients."""
        for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            if parameter.grad is not None:
                local(parameter.grad).clamp_(min=-clip_value, max=clip_value)

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the whole gradients of this rank's data; ranks that share a layer bring its gradient together."""
        return {name: whole(gradient) for name, gradient in super().open_gradients(model).items()}

    def set_open_gradients(self, model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of the gradients of an open window."""
        parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        own = {name: split_like(gradients[name], parameters[name]) for name in parameters if name in gradients}
        super().set_open_gradients(model, own)

    def replaced(
        self, before: Sequence[torch.nn.Parameter], after: Sequence[torch.nn.Parameter]
    ) -> dict[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Return what stands in for split parameters; None for those of other stages."""
        if axis_group(self.mesh, "pp") is None:
            return super().replaced(before, after)
        kept = {id(parameter) for parameter in after}
        return {parameter: None for parameter in before if id(parameter) not in kept}

    def full_state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights on the main process, brought together from the ranks; nothing on the others."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        stages = axis_group(self.mesh, "pp")
        if stages is not None:
            return gather_stages(inner.state_dict(), stages, keep=self.runtime.rank == 0)
        return gather_whole(inner.state_dict(), keep=self.runtime.rank == 0)

    def originals(self, model: torch.nn.Module) -> Originals:
        """Return the parameters of the model as the user knows them, without asking other ranks."""
        return Originals.of(model)

    def checkpoint_parts(self, prepared: Prepared) -> list[Part]:
        """Return the parts of a checkpoint; models and optimizers are written by all ranks together, and first."""
        parts = super().checkpoint_parts(prepared)
        others = [part for part in parts if not isinstance(part, (ModelPart, OptimizerPart))]
        models: list[Part] = [ShardedModelPart(self, model, index) for index, model in enumerate(prepared.models)]
        stages = axis_group(self.mesh, "pp")
        optimizers: list[Part] = [
            self._optimizer_part(optimizer, model_of(optimizer, prepared.models), index, stages)
            for index, optimizer in enumerate(prepared.optimizers)
        ]
        return [*models, *optimizers, *others]

    def _optimizer_part(
        self, optimizer: Any, model: torch.nn.Module, index: int, stages: dist.ProcessGroup | None
    ) -> Part:
        if stages is None:
            return ShardedOptimizerPart(self, optimizer, model, index)
        return StageOptimizerPart(self, optimizer, model, index, stages)


def check_pipeline(layout: Any, scales: bool) -> None:
    """Refuse what cannot be combined with stages.

    Raises:
        ConfigurationError: If other axes than replicas are in use, or losses are scaled.
    """
    others = [f"{axis}_size={layout.sizes[axis]}" for axis in ("tp", "cp", "sp", "dp_shard") if layout.sizes[axis] > 1]
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
