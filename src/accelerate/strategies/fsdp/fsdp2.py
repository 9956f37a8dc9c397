"""Version 2 of FSDP: every parameter is split by itself, and the model stays the user's own object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.offload.tensors import move_module
from accelerate.parallel.mesh import build_mesh, submesh
from accelerate.parallel.tensor import model_has_dtensor, tensor_parallel_step
from accelerate.runtime.torch_private import contiguous_placements, eager_only
from accelerate.strategies.base import Step
from accelerate.strategies.broadcast_weights import WeightBroadcast, require_memory
from accelerate.strategies.fsdp import public
from accelerate.strategies.fsdp.base import FSDPStrategy, ignored_modules, unit_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDP2Strategy(FSDPStrategy):
    """torch's `fully_shard`, alone or together with other axes of a mesh."""

    name: ClassVar[str] = "fsdp2"
    version: ClassVar[int] = 2
    prepare_method: ClassVar[str | None] = "_prepare_fsdp2"

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Return the ranks over which weights are sharded, after those that hold copies where there are any."""
        layout, device = self.context.parallelism, self.runtime.device.type
        whole = None if layout is None else layout.get_device_mesh(device)
        if layout is None or whole is None:
            mesh = build_mesh(device, {MeshAxis.DP_SHARD.value: self.runtime.world_size}, {})
            assert mesh is not None, "one process has no mesh"
            return mesh
        if layout.dp_shard_cp_dim_names:
            return submesh(whole, *layout.fsdp_dim_names)
        from torch.distributed.device_mesh import init_device_mesh

        # Copies without shards: a second axis of one rank each.
        axes = (MeshAxis.DP_REPLICATE.value, MeshAxis.DP_SHARD.value)
        return init_device_mesh(device, (self.runtime.world_size, 1), mesh_dim_names=axes)

    def steps(self, *, place: bool, evaluation: bool) -> tuple[Step, ...]:
        """Return what is done to a model, in order; layers are split over ranks before all else."""
        chain = super().steps(place=place, evaluation=evaluation)
        layout = self.context.parallelism
        if layout is None or not layout.tp_enabled or not self.runtime.is_distributed:
            return chain
        split = tensor_parallel_step(layout.get_device_mesh(), layout.tp_handler.plan)
        first = (None if evaluation else self.convert, self.broadcast_weights, split)
        return (*(step for step in first if step is not None), *chain)

    def convert(self, model: nn.Module) -> nn.Module:
        """Replace layers by those of the number format, whose weights may be exchanged in it."""
        return self.precision.convert(model, gathered=self.runtime.is_distributed)

    def broadcast_weights(self, model: nn.Module) -> nn.Module:
        """Give every rank the weights of the first: what each rank of a model holds whole must be equal."""
        if not model_has_dtensor(model):
            WeightBroadcast(model, self.runtime.device).send_all()
        return model

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model through the public function, which other libraries replace."""
        owner = self.context.accelerator
        return public.fsdp2_prepare_model(None if owner is None else owner(), model)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the blocks that the plugin selects, then what is left of the model; it stays the same object."""
        from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard

        if isinstance(model, FSDPModule):
            return model
        plugin = self.plugin
        self._check_scaler()
        for name, parameter in model.named_parameters():
            packed = contiguous_placements(parameter)
            if packed is not None and packed[-1].is_shard(0):
                raise ConfigurationError(
                    f"The packed weight {name!r} of {type(model).__name__} is split along dimension 0 over tp_size ranks, "
                    "and FSDP would split the same dimension again. Leave it out of the plan, or set dp_shard_size=1."
                )
        units = [*unit_names(plugin, model), ""]
        # Copies must start equal, so they take the weights of the first rank as well.
        from_first = (plugin.cpu_ram_efficient_loading or self.mesh.ndim > 1) and not model_has_dtensor(model)
        weights = WeightBroadcast(model, self.runtime.device) if from_first else None
        options: dict[str, Any] = {"mesh": self.mesh}
        if plugin.mixed_precision_policy is not None:
            options["mp_policy"] = plugin.mixed_precision_policy
        if isinstance(plugin.cpu_offload, OffloadPolicy):
            options["offload_policy"] = plugin.cpu_offload
        for unit in units:
            module = model.get_submodule(unit)
            pending = weights.allocate(unit) if weights is not None else []
            if weights is None:
                require_memory(module, plugin.param_init_fn)
            reshard: Any = plugin.reshard_after_forward
            if not unit and len(units) > 1 and reshard:
                # torch then keeps what is left of the model after the forward pass, because backward begins with it.
                reshard = None
            ignored = self._ignored_parameters(model)
            self.place_unit(module)
            fully_shard(module, reshard_after_forward=reshard, ignored_params=ignored or None, **options)
            if weights is not None:
                weights.send(pending)
        self.sharded_units.add(model)
        if reshard is None:
            model.register_forward_hook(_reshard_without_backward)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self.sharded_units.follow(optimizer)  # also if its model is prepared later

    def _check_scaler(self) -> None:
        """Refuse to scale gradients that wait in host memory.

        torch 2.9 to 2.15 copy the scale there without waiting for the copy, and would lose that gradients overflowed.
        """
        from torch.distributed.fsdp import CPUOffloadPolicy

        is_offloaded = isinstance(self.plugin.cpu_offload, CPUOffloadPolicy) and self.runtime.device.type != "cpu"
        if is_offloaded and self.precision.scaler is not None:
            raise ConfigurationError(
                f"mixed_precision={self.precision.name!r} cannot be used with cpu_offload=True of FSDP 2: whether "
                "gradients in host memory overflowed is not noticed. Write mixed_precision='bf16', or leave cpu_offload "
                "out."
            )

    def _ignored_parameters(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the parameters of the modules that are left alone, moved to the device where they are used."""
        modules = ignored_modules(self.plugin, model)
        for module in modules:
            if not any(parameter.is_meta for parameter in module.parameters()):
                move_module(module, self.runtime.device)
        found = {parameter for module in modules for parameter in module.parameters()}
        if any(parameter.requires_grad for parameter in found):
            warn_once(
                "Modules that FSDP ignores have parameters to train: their gradients are not averaged between processes. "
                "Freeze them, or average the gradients yourself after each backward pass."
            )
        return found

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        if not hasattr(model, "set_requires_gradient_sync"):
            yield
            return
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


@eager_only
def _reshard_without_backward(model: Any, *_: Any) -> None:
    """Free the gathered parameters after a forward pass that no backward pass follows."""
    if not torch.is_grad_enabled():
        model.reshard()
