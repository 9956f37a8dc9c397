"""One process that drives all XLA devices together (SPMD): batches, weights and layers are spread by annotations."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy
import torch

from accelerate._base.helpers import Choice, log_once
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import ModelPart, OptimizerPart, Part, Prepared
from accelerate.collectives.base import communicator
from accelerate.devices.xla import XLA
from accelerate.parallel.mesh import GradientShare
from accelerate.parallel.tensor import plan_of
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime import current
from accelerate.runtime.current import Runtime
from accelerate.strategies.base import Capabilities, EngineRequest, Step, StrategyContext
from accelerate.strategies.xla.layout import (
    AXES,
    REPLICATE,
    SHARD,
    TENSOR,
    BatchSharding,
    Spec,
    batch_axes,
    batch_spec,
    split_dimensions,
    tensors_of,
    weight_spec,
)
from accelerate.strategies.xla.strategy import XlaStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SPEC = "_partition_spec"


class SpmdStrategy(XlaStrategy):
    """Compute one step on all devices: the batch is spread over them, and weights where `dp_shard_size` asks for it.

    The program is that of a single process: XLA puts the exchange between devices into the compiled step. So the loss is
    that of the whole batch, and gradients need no averaging.
    """

    name: ClassVar[str] = "xla-spmd"
    caps: ClassVar[Capabilities] = Capabilities()

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        import torch_xla.distributed.spmd as xs

        count = XLA.device_count()
        sizes = {REPLICATE: count} if context.parallelism is None else context.parallelism.sizes
        self.sizes = {axis: sizes.get(axis, 1) for axis in AXES}
        # Without axes of one device: torch_xla (2.9) cannot spread a tensor of one dimension over a mesh that has such.
        used = {axis: size for axis, size in self.sizes.items() if size > 1} or {REPLICATE: count}
        self.mesh = xs.Mesh(numpy.arange(count), tuple(used.values()), tuple(used))
        if xs.get_global_mesh() is None:
            xs.set_global_mesh(self.mesh)

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take every run whose process drives all devices; a layout of the devices asks for that."""
        if request.parallelism is not None:
            XLA.use_together()
        return Choice(XLA.is_spmd, "one process drives all XLA devices")

    @classmethod
    def lay_out(cls, sizes: ParallelismConfig, runtime: Runtime) -> DeviceMesh | None:
        """Check the sizes against the devices; the mesh over them is torch_xla's own."""
        sizes.fit(XLA.device_count(), "XLA devices")
        return None

    @property
    def num_shares(self) -> int:
        """Return over how many devices the samples of a batch are spread."""
        return prod(self.sizes[axis] for axis in batch_axes(AXES))

    def check_model(self, model: torch.nn.Module, *, evaluation: bool) -> None:
        """Refuse a model whose layers cannot be split as asked."""
        if self.sizes[TENSOR] > 1:
            split_dimensions(model, self._plan(model))

    def _plan(self, model: torch.nn.Module) -> dict[str, Any]:
        handler = self.context.parallelism.tp_handler if self.context.parallelism is not None else None
        return handler.plan if handler is not None and handler.plan is not None else plan_of(model)

    def steps(self, *, place: bool, evaluation: bool) -> tuple[Step, ...]:
        """Annotate a model once it is on the devices."""
        *before, last = super().steps(place=place, evaluation=evaluation)
        return (*before, self.annotate, last)

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the devices, with the weights of the first machine on all of them."""
        if self.runtime.is_distributed:
            for value in (*model.parameters(), *model.buffers()):
                communicator().broadcast(value)
        return super().place(model)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model: XLA sees to the exchange of gradients."""
        return model

    def annotate(self, model: torch.nn.Module) -> torch.nn.Module:
        """Say how each weight is spread; layers whose weights are sharded keep their outputs spread by samples."""
        if self.sizes[SHARD] == self.sizes[TENSOR] == 1:
            return model
        splits = split_dimensions(model, self._plan(model)) if self.sizes[TENSOR] > 1 else {}
        for name, parameter in model.named_parameters():
            spec = weight_spec(tuple(parameter.shape), self.sizes[SHARD], splits.get(name))
            if any(spec):
                parameter.__dict__[_SPEC] = spec
                self.mark(parameter, spec)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._mark_gradient)
        for module_name, module in model.named_modules():
            own = [f"{module_name}.{leaf}" if module_name else leaf for leaf in module._parameters]
            if not any(name in splits for name in own) and any(_spec_of(p) for p in module.parameters(recurse=False)):
                module.register_forward_hook(self._mark_output)
        return model

    def mark(self, tensor: torch.Tensor, spec: Spec) -> None:
        """Say how a tensor is spread over the mesh."""
        import torch_xla.distributed.spmd as xs

        xs.clear_sharding(tensor)  # a second annotation would be ignored
        xs.mark_sharding(tensor, self.mesh, spec)

    def _mark_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.mark(parameter.grad, _spec_of(parameter))

    def _mark_output(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_of(output):
            if tensor.dim() > 1 and tensor.shape[0] % self.num_shares == 0:
                self.mark(tensor, batch_spec(self.mesh.axis_names, tensor.dim()))

    def share_batches(self, loader: Any) -> None:
        """Spread the samples of each batch over the devices, and say once how many each gets."""
        if not hasattr(loader, "share_over_devices"):
            return
        loader.share_over_devices(BatchSharding(self.mesh, minibatch=self.runtime.is_distributed))
        size = getattr(loader, "total_batch_size", 0)
        if self.runtime.rank == 0 and size:
            log_once(
                __name__,
                f"{XLA.device_count()} XLA devices work on each batch together: {size} samples are "
                f"{size / self.num_shares:g} a device.",
            )

    def gradient_share(self) -> GradientShare:
        """Return that the gradients are those of all data, whichever machine asks."""
        return GradientShare(0, 1)

    def weight_parts(self, prepared: Prepared) -> list[Part]:
        """Return parts whose snapshots bring shards together, which all machines take part in."""
        safe = prepared.safe_serialization
        return [
            *(SpreadModelPart(model, i, safe_serialization=safe) for i, model in enumerate(prepared.models)),
            *(SpreadOptimizerPart(optimizer, i, self) for i, optimizer in enumerate(prepared.optimizers)),
        ]


def _spec_of(tensor: torch.Tensor) -> Spec:
    """Return how a parameter is spread; empty for one that every device holds whole."""
    spec: Spec = tensor.__dict__.get(_SPEC, ())
    return spec


class SpreadModelPart(ModelPart):
    """A model whose weights may be spread over devices: all machines take its snapshot, one writes it."""

    everywhere = True

    def write(self, payload: Any, folder: FolderWriter) -> None:
        if current.runtime().rank == 0:
            super().write(payload, folder)


class SpreadOptimizerPart(OptimizerPart):
    """An optimizer whose state is spread as its parameters are."""

    everywhere = True

    def __init__(self, optimizer: Any, index: int, strategy: SpmdStrategy) -> None:
        super().__init__(optimizer, index)
        self.strategy = strategy

    def write(self, payload: Any, folder: FolderWriter) -> None:
        if current.runtime().rank == 0:
            super().write(payload, folder)

    def restore(self, payload: Any) -> None:
        super().restore(payload)
        for parameter, state in self.optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and _spec_of(parameter):
                    self.strategy.mark(value, _spec_of(parameter))
