"""What both versions of FSDP have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate._base.enums import DistributedType
from accelerate._base.helpers import Choice, warn_once
from accelerate.checkpointing.parts import ModelPart, OptimizerPart, Part, Prepared
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.parallel.activation_checkpoint import checkpoint_blocks
from accelerate.parallel.compile import compile_regions_fsdp2, has_repeated_blocks
from accelerate.parallel.gradients import local, scale_gradients
from accelerate.parallel.state import gather_whole
from accelerate.parallel.unwrap import extract_model_from_parallel
from accelerate.runtime.runtime import Runtime
from accelerate.strategies.base import Capabilities, Step, Strategy, StrategyContext
from accelerate.strategies.fsdp.open_windows import read_open_gradients, write_open_gradients
from accelerate.strategies.fsdp.originals import Originals
from accelerate.strategies.fsdp.parts import ShardedModelPart, ShardedOptimizerPart
from accelerate.strategies.fsdp.wrapping import block_names
from accelerate.strategies.request import EngineRequest

_POLICY_DTYPES = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


class ShardedStrategy(Strategy):
    """Each rank holds a part of the weights, gradients and optimizer state, and reads its own data."""

    engine: ClassVar[str | None] = "fsdp"
    caps: ClassVar[Capabilities] = Capabilities(shards=True, holds_back_gradients=True, hides_open_gradients=True)
    version: ClassVar[int]

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.plugin = context.fsdp if context.fsdp is not None else FullyShardedDataParallelPlugin()
        dtype = _POLICY_DTYPES.get(self.precision.name)
        if dtype is not None:
            # Weights travel in half precision; gradients are added up in single, as other engines do.
            self.plugin.set_mixed_precision({"param_dtype": dtype, "reduce_dtype": "fp32"})

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take the runs whose plugin asks for this version."""
        plugin = request.engines.get("fsdp")
        asked = getattr(plugin, "fsdp_version", None)
        return Choice(asked == cls.version, f"the plugin of FSDP asks for version {asked}")

    @classmethod
    def label(cls, runtime: Runtime) -> DistributedType:
        """Return FSDP; one process has nothing to share."""
        return DistributedType.FSDP if runtime.is_distributed else DistributedType.NO

    def steps(self, *, place: bool, evaluation: bool) -> tuple[Step, ...]:
        """Return what is done to a model, in order.

        Activation checkpointing comes before the compiler, which then sees through it, and both come before sharding:
        a compiled block is sharded as one, and the exchange of weights stays outside of it. Sharding places the
        weights, so the whole model is never moved to a device; it also serves evaluation.
        """
        spread: tuple[Step, ...] = (self.wrap,)
        if not self.runtime.is_distributed:
            spread = (self.place,) if place else ()
        return (
            self.raise_precision,
            self.precision.wrap_forward,
            self.checkpoint_activations,
            self.compile_blocks,
            *spread,
            self.compile_whole,
        )

    def raise_precision(self, model: nn.Module) -> nn.Module:
        """Keep the weights that are trained in float32 where a smaller format only computes."""
        if not self.precision.native_amp:
            return model
        small = [
            parameter
            for parameter in model.parameters()
            if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype.itemsize < 4
        ]
        for parameter in small:
            parameter.data = parameter.data.float()
        if small:
            warn_once(
                f"{len(small)} parameters of {type(model).__name__} are trained in float32, because "
                f"mixed_precision={self.precision.name!r} computes in half precision from weights in full. "
                "Write mixed_precision='no' to train in the format that the model was loaded in."
            )
        return model

    def checkpoint_activations(self, model: nn.Module) -> nn.Module:
        """Let the blocks that are sharded on their own compute their activations again, where that was asked for."""
        if not self.plugin.activation_checkpointing:
            return model
        names = block_names(self.plugin, model)
        if not names:
            warn_once(
                "activation_checkpointing=True finds no blocks: the wrap policy of the FSDP plugin names none, so all "
                "activations are kept. Set auto_wrap_policy and transformer_cls_names_to_wrap."
            )
        return checkpoint_blocks(model, names, offload=bool(self.plugin.activation_checkpointing_offload))

    def compile_blocks(self, model: nn.Module) -> nn.Module:
        """Compile repeated blocks in place: sharding holds on to the modules themselves."""
        dynamo = self.context.dynamo
        if not self.compiles or not dynamo.use_regional_compilation or not has_repeated_blocks(model):
            return model
        return compile_regions_fsdp2(model, **dynamo.to_kwargs())

    def scale_gradients(self, parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
        """Multiply this rank's part of the gradients by `factor`."""
        scale_gradients(parameters, factor)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit each element of this rank's part of the gradients."""
        for parameter in parameters:
            if parameter.grad is not None:
                local(parameter.grad).clamp_(min=-clip_value, max=clip_value)

    def open_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return what this rank has summed up in a window that is open: whole gradients, not exchanged yet."""
        if not self.runtime.is_distributed:
            return super().open_gradients(model)
        return read_open_gradients(model)

    def set_open_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Put gradients where the exchange at the end of the window finds them."""
        if not self.runtime.is_distributed:
            super().set_open_gradients(model, gradients)
            return
        write_open_gradients(model, gradients)

    def full_state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights on the first rank and nothing on the others; every rank must call it.

        Tensors are gathered one after another, so that a rank holds one whole tensor beside its shards.
        """
        if not self.runtime.is_distributed:
            return super().full_state_dict(model, unwrap=unwrap)
        return gather_whole(self.sharded_weights(model), keep=self.runtime.rank == 0)

    def sharded_weights(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict in shards."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        return inner.state_dict(keep_vars=True)

    def originals(self, model: nn.Module) -> Originals:
        """Return the parameters of the model as the user knows them, without asking other ranks."""
        return Originals.of(model)

    def checkpoint_parts(self, prepared: Prepared) -> list[Part]:
        """Return the parts of a checkpoint; models and optimizers are written by all ranks together, and first."""
        parts = super().checkpoint_parts(prepared)
        others = [part for part in parts if not isinstance(part, (ModelPart, OptimizerPart))]
        models: list[Part] = [ShardedModelPart(self, model, index) for index, model in enumerate(prepared.models)]
        optimizers: list[Part] = [
            ShardedOptimizerPart(self, optimizer, model_of(optimizer, prepared.models), index)
            for index, optimizer in enumerate(prepared.optimizers)
        ]
        return [*models, *optimizers, *others]


def model_of(optimizer: Any, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model whose parameters an optimizer trains."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return next((model for model in models if any(id(item) in own for item in model.parameters())), models[0])
