"""Version 2 of FSDP: every parameter is split by itself, and the model stays the user's own object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accelerate.parallel.describe import model_has_dtensor
from accelerate.parallel.mesh import build_mesh, has_axis, submesh
from accelerate.parallel.steps import tensor_parallel_step
from accelerate.strategies.base import Step
from accelerate.strategies.fsdp.filling import Filler, require_memory
from accelerate.strategies.fsdp.norms import Groups, clip_parts
from accelerate.strategies.fsdp.sharding import ShardedStrategy
from accelerate.strategies.fsdp.wrapping import ignored_parameters, unit_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDP2Strategy(ShardedStrategy):
    """torch's `fully_shard`, alone or together with other axes of a mesh."""

    name: ClassVar[str] = "fsdp2"
    version: ClassVar[int] = 2
    _mesh: DeviceMesh | None = None

    @property
    def mesh(self) -> DeviceMesh:
        """Return the ranks over which weights are sharded, after those that hold copies where there are any."""
        if self._mesh is None:
            self._mesh = _sharding_mesh(self.context.parallelism, self.runtime.device.type, self.runtime.world_size)
        return self._mesh

    def steps(self, *, place: bool, evaluation: bool) -> tuple[Step, ...]:
        """Return what is done to a model, in order; layers are split over ranks before all else."""
        chain = super().steps(place=place, evaluation=evaluation)
        layout = self.context.parallelism
        if layout is None or not layout.tp_enabled or not self.runtime.is_distributed:
            return chain
        split = tensor_parallel_step(layout.get_device_mesh(), layout.tp_handler.plan)
        return (self.fill, *((split,) if split is not None else ()), *chain)

    def fill(self, model: nn.Module) -> nn.Module:
        """Give every rank the weights of the first: what each rank of a model holds whole must be equal."""
        if not model_has_dtensor(model):
            Filler(model, self.runtime.device).fill("")
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Shard the blocks that the plugin selects, then what is left of the model; it stays the same object."""
        from torch.distributed.fsdp import FSDPModule, OffloadPolicy, fully_shard

        if isinstance(model, FSDPModule):
            return model
        plugin = self.plugin
        units = [*unit_names(plugin, model), ""]
        # Copies must start equal, so they take the weights of the first rank as well.
        from_first = (plugin.cpu_ram_efficient_loading or self.mesh.ndim > 1) and not model_has_dtensor(model)
        filler = Filler(model, self.runtime.device) if from_first else None
        options: dict[str, Any] = {"mesh": self.mesh}
        if plugin.mixed_precision_policy is not None:
            options["mp_policy"] = plugin.mixed_precision_policy
        if isinstance(plugin.cpu_offload, OffloadPolicy):
            options["offload_policy"] = plugin.cpu_offload
        for unit in units:
            module = model.get_submodule(unit)
            waiting = filler.place(unit) if filler is not None else []
            if filler is None:
                require_memory(module, plugin.param_init_fn)
            reshard: Any = plugin.reshard_after_forward
            if not unit and len(units) > 1 and reshard:
                reshard = None  # torch then keeps what is left of the model: backward needs it at once
            ignored = ignored_parameters(plugin, model, self.runtime.device)
            fully_shard(module, reshard_after_forward=reshard, ignored_params=ignored or None, **options)
            if filler is not None:
                filler.send(waiting)
        return model

    @contextmanager
    def _without_exchange(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients are added up whole on each rank and not exchanged."""
        return self._without_exchange(model) if hasattr(model, "set_requires_gradient_sync") else nullcontext()

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale gradients down so that the norm over all ranks is at most `max_norm`, and return that norm."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return clip_parts(((item, _groups(item)) for item in given), max_norm, norm_type, self.runtime.device)


def _groups(parameter: Any) -> Groups:
    """Return the groups of ranks over which a parameter is split."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return ()
    placements = enumerate(parameter.placements)
    # A parameter that is split twice along one dimension has a placement that is no plain shard.
    return tuple(mesh.get_group(axis) for axis, placement in placements if not placement.is_replicate())


def _sharding_mesh(layout: Any, device_type: str, world_size: int) -> DeviceMesh:
    mesh: DeviceMesh | None = None if layout is None else layout.get_device_mesh(device_type)
    if mesh is None:
        made = build_mesh(device_type, {"dp_shard": world_size}, {})
        assert made is not None, "one process has no mesh"
        return made
    if has_axis(mesh, "dp_shard") or has_axis(mesh, "cp"):
        return submesh(mesh, *layout.fsdp_dim_names)
    from torch.distributed.device_mesh import init_device_mesh

    # Copies without shards: a second axis of one rank each.
    return init_device_mesh(device_type, (world_size, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
