"""Models that arrive sharded: another library has split their weights and exchanges their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate._base.enums import DistributedType, MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.checkpointing.parts import Part, Prepared
from accelerate.collectives.torch_dist import TorchDistCommunicator
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.parallel.mesh import averaging_group
from accelerate.parallel.tensor import check_tp_size
from accelerate.parallel.unwrap import extract_model_from_parallel, plain_name
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime.current import Runtime
from accelerate.strategies import tools
from accelerate.strategies.base import EngineRequest, Step, StrategyContext
from accelerate.strategies.broadcast_weights import equal_weights_step
from accelerate.strategies.fsdp.base import FSDPStrategy
from accelerate.strategies.parallel import AVERAGER, GradientAverager, suspended
from accelerate.strategies.sharded_state import sharded_parts


class PreshardedStrategy(FSDPStrategy):
    """A layout with an axis of shards and no engine: `fully_shard` was applied to the model before it is prepared.

    The library that loaded the model, such as Transformers with a `DistributedConfig`, may have split experts too.
    Gradients of parameters that are not sharded, such as adapters added later, are averaged here.
    """

    name: ClassVar[str] = "presharded"
    engine: ClassVar[str | None] = None
    version: ClassVar[int] = 2

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(replace(context, fsdp=FullyShardedDataParallelPlugin(fsdp_version=2)))
        # The registry selects this strategy for a layout, on several processes.
        assert context.parallelism is not None
        self.layout = context.parallelism
        self.mesh = self.layout.device_mesh
        group = averaging_group(self.mesh)
        assert group is not None, "an axis of shards has several ranks"
        self.data_ranks = group
        if isinstance(self.precision.scaler, SharedGradScaler):
            # Gradients are on several meshes, and a rank sees overflows in its local shards only.
            self.precision.scaler.agree_on_overflow = True

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take layouts with an axis of shards; stages of a pipeline are not sharded."""
        layout = request.parallelism
        if layout is None or not runtime.is_distributed:
            return Choice(False, "no axes of parallelism were given")
        shards = f"dp_shard_size={layout.dp_shard_size} and pp_size={layout.pp_size} were given without an engine"
        return Choice(layout.dp_shard_enabled and not layout.pp_enabled, shards)

    @classmethod
    def label(cls, runtime: Runtime) -> DistributedType:
        return runtime.backend.label

    def check_model(self, model: nn.Module, *, evaluation: bool) -> None:
        """Refuse a model that is not sharded, or sharded over other ranks than those of the layout."""
        kind, sizes = type(model).__name__, f"dp_shard_size={self.layout.dp_shard_size}"
        if self.precision.name == "fp8":
            raise ConfigurationError(
                f"mixed_precision='fp8' replaces layers, but those of {kind} are already sharded. Use "
                "mixed_precision='bf16', or pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) and a model "
                "that is not sharded."
            )
        check_tp_size(model, self.layout.sizes[MeshAxis.TP])
        is_sharded = False
        for name, parameter in model.named_parameters():
            shared = tools.ranks_in(parameter, self.data_ranks)
            is_sharded |= len(shared) > 1
            if 1 < len(shared) < self.data_ranks.size():
                raise ConfigurationError(
                    f"The parameter {name!r} of {kind} is sharded over the ranks {shared}, but the run has {sizes} and "
                    f"averages gradients over {self.data_ranks.size()} ranks. Use the sizes that the model was loaded with."
                )
        if not is_sharded:
            raise ConfigurationError(
                f"{sizes} was given without an engine that shards, and {kind} is not sharded either. Pass "
                "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or load the model sharded."
            )

    def steps(self, *, place: bool, evaluation: bool) -> tuple[Step, ...]:
        """Return what is done to a model, in order; its weights stay where they are."""
        equal = equal_weights_step(self.mesh)
        chain = (equal, None if evaluation else self.wrap, self.precision.wrap_forward)
        return (*(step for step in chain if step is not None), self.compile_blocks, self.compile_whole)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Average the gradients of parameters that every rank holds; those of sharded ones are exchanged already."""
        self.sharded_units.free_gathered()  # gathered parameters look like those that every rank holds
        whole = [parameter for parameter in model.parameters() if parameter.requires_grad and self._is_whole(parameter)]
        if whole and AVERAGER not in model.__dict__:
            model.__dict__[AVERAGER] = GradientAverager(
                whole, TorchDistCommunicator(self.data_ranks, self.runtime.device).average
            )
        return model

    def _is_whole(self, parameter: torch.Tensor) -> bool:
        return len(tools.ranks_in(parameter, self.data_ranks)) == 1

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        super().prepare_optimizer(optimizer)
        tools.update_one_by_one(optimizer)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        units = list(_sharded_modules(extract_model_from_parallel(model, keep_torch_compile=False)))
        with ExitStack() as stack:
            stack.enter_context(suspended(model))
            for unit in units:
                unit.set_requires_gradient_sync(False)
                stack.callback(unit.set_requires_gradient_sync, True)
            yield

    def open_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        found = super().open_gradients(model)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and self._is_whole(parameter):
                found[plain_name(name)] = tools.full(parameter.grad)
        return found

    def gather_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        # Experts see the tokens of several ranks: each of these ranks reports the mean as its own gradient.
        return tools.full(gradient) / len(tools.ranks_in(gradient, self.data_ranks))

    def split_gradient(self, gradient: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
        # Transformers names the axis over which experts are split "ep".
        own = tools.split_like(gradient, parameter, axes=(MeshAxis.TP, "ep"))
        return own * len(tools.ranks_in(own, self.data_ranks))

    def set_open_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        super().set_open_gradients(model, gradients)
        for name, parameter in model.named_parameters():
            gradient = gradients.get(plain_name(name))
            if gradient is not None and self._is_whole(parameter):
                parameter.grad = tools.split_like(gradient, parameter).to(parameter.device)

    def weight_parts(self, prepared: Prepared) -> list[Part]:
        return sharded_parts(prepared)


def _sharded_modules(module: nn.Module) -> Iterator[Any]:
    """Yield the outermost modules that `fully_shard` was applied to; adapters may be wrapped around them."""
    if hasattr(module, "set_requires_gradient_sync"):
        yield module
        return
    for child in module.children():
        yield from _sharded_modules(child)
