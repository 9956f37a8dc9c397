"""Version 1 of FSDP: wrappers that hold the parameters of a module as one flat tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from accelerate._base.errors import ConfigurationError
from accelerate.parallel.activation_checkpoint import inner_block
from accelerate.parallel.unwrap import plain_name
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime.memory import trim_host_memory
from accelerate.runtime.torch_private import flat_parameter_names, flat_pieces, flat_shard, is_flattened
from accelerate.strategies.base import StrategyContext
from accelerate.strategies.fsdp.filling import Filler, Waiting, require_memory
from accelerate.strategies.fsdp.norms import Groups, clip_parts
from accelerate.strategies.fsdp.originals import ORIGINALS, Originals
from accelerate.strategies.fsdp.sharding import ShardedStrategy
from accelerate.strategies.fsdp.wrapping import ignored_modules, unit_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDP1Strategy(ShardedStrategy):
    """torch's `FullyShardedDataParallel`."""

    name: ClassVar[str] = "fsdp1"
    version: ClassVar[int] = 1
    _mesh: DeviceMesh | None = None

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._replaced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        scaler = self.precision.scaler
        if isinstance(scaler, SharedGradScaler) and self.runtime.is_distributed:
            # A rank sees the overflow of its own shard only.
            scaler.agree_on_overflow = True

    @property
    def mesh(self) -> DeviceMesh:
        """Return the ranks over which weights are sharded, after those that hold copies where there are any."""
        if self._mesh is None:
            self._mesh = self._make_mesh()
        return self._mesh

    @property
    def _is_hybrid(self) -> bool:
        return "HYBRID" in str(getattr(self.plugin.sharding_strategy, "name", ""))

    def _make_mesh(self) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        device, world = self.runtime.device.type, self.runtime.world_size
        layout = self.context.parallelism
        if layout is not None and layout.non_data_parallel_size > 1:
            raise ConfigurationError(
                f"{layout!r} splits layers or sequences, which FSDP 1 cannot be combined with. Set fsdp_version=2."
            )
        if not self._is_hybrid:
            return init_device_mesh(device, (world,))
        shards = self.runtime.topology.local_world_size
        if layout is not None and layout.dp_shard_size and layout.dp_shard_size > 1:
            shards = layout.dp_shard_size
        return init_device_mesh(device, (world // shards, shards), mesh_dim_names=("dp_replicate", "dp_shard"))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the blocks that the plugin selects, children first, then the model."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        if isinstance(model, FullyShardedDataParallel):
            return model
        plugin = self.plugin
        names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        originals = Originals.of(model)
        before = list(model.parameters())
        options = self._options(model)
        filling = None
        if plugin.sync_module_states or plugin.cpu_ram_efficient_loading or self._is_hybrid:
            filling = _Filling(Filler(model, self.runtime.device))
        for unit in unit_names(plugin, model):
            parent_name, _, child = unit.rpartition(".")
            parent = inner_block(model.get_submodule(parent_name))
            setattr(parent, child, self._wrap_unit(model.get_submodule(unit), unit, filling, options))
        wrapped = self._wrap_unit(model, "", filling, options)
        if filling is not None:
            filling.finish()
        # Those that had no memory are new ones, also where they are not joined.
        by_name = {plain_name(name): parameter for name, parameter in wrapped.named_parameters()}
        by_name.update(_flat_parameters(wrapped))
        for parameter in before:
            new = by_name.get(names[id(parameter)], parameter)
            if new is not parameter:
                self._replaced[parameter] = new
        wrapped.__dict__[ORIGINALS] = originals
        return wrapped

    def _wrap_unit(self, module: nn.Module, unit: str, filling: _Filling | None, options: dict[str, Any]) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if filling is None:
            require_memory(module, self.plugin.param_init_fn)
            return FullyShardedDataParallel(module, **options)
        waiting = filling.filler.place(unit)
        wrapped = FullyShardedDataParallel(module, **options)
        filling.postpone(unit, wrapped, waiting)
        return wrapped

    def _options(self, model: nn.Module) -> dict[str, Any]:
        plugin = self.plugin
        on_host = self.runtime.device.type == "cpu"
        offload = plugin.cpu_offload
        return {
            "sharding_strategy": plugin.sharding_strategy,
            # On the CPU weights are where they would be moved to.
            "cpu_offload": None if on_host else offload,
            "backward_prefetch": plugin.backward_prefetch,
            "mixed_precision": plugin.mixed_precision_policy,
            "ignored_modules": ignored_modules(plugin, model) or None,
            "device_id": self.runtime.device,
            "forward_prefetch": bool(plugin.forward_prefetch),
            "limit_all_gathers": plugin.limit_all_gathers,
            "use_orig_params": bool(plugin.use_orig_params),
            "device_mesh": self.mesh,
        }

    def replaced(
        self, before: Sequence[nn.Parameter], after: Sequence[nn.Parameter]
    ) -> dict[nn.Parameter, nn.Parameter | None]:
        """Return the flat parameter that holds each old one, or the one that has memory in place of one without."""
        return {old: self._replaced[old] for old in before if old in self._replaced}

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients are added up whole on each rank and not exchanged."""
        suspend = getattr(model, "no_sync", None)
        return suspend() if suspend is not None else nullcontext()

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale gradients down so that the norm over all ranks is at most `max_norm`, and return that norm."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return clip_parts(((item, self._groups(item)) for item in given), max_norm, norm_type, self.runtime.device)

    def _groups(self, parameter: Any) -> Groups:
        if str(getattr(self.plugin.sharding_strategy, "name", "")) == "NO_SHARD" or not is_flattened(parameter):
            return ()
        return (self.mesh.get_group(self.mesh.ndim - 1),)

    def originals(self, model: nn.Module) -> Originals:
        """Return the parameters that the model had: asking it now would take all ranks."""
        kept: Originals | None = model.__dict__.get(ORIGINALS)
        return kept if kept is not None else super().originals(model)

    def sharded_weights(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict in shards; one unit at a time is made whole for it."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        # Without a copy to the CPU: there it raises or ends the process (torch 2.13), and elsewhere each tensor is moved
        # when it is whole.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")  # whole weights are no surprise there
            return get_model_state_dict(model)


class _Filling:
    """The weights of the first rank, sent when all units are wrapped.

    torch joins the weights of a unit before it cuts them. Shards have no memory until then, so that a rank holds either
    its shards or one whole unit.
    """

    def __init__(self, filler: Filler) -> None:
        self.filler = filler
        self._units: list[tuple[str, nn.Module, list[Waiting]]] = []

    def postpone(self, unit: str, wrapped: nn.Module, waiting: list[Waiting]) -> None:
        """Keep for later what a unit waits for, and let go of the memory of its shard."""
        shard = flat_shard(wrapped)
        if shard is not None:
            shard.untyped_storage().resize_(0)
        self._units.append((unit, wrapped, waiting))
        trim_host_memory()

    def finish(self) -> None:
        """Give every shard memory and the values of the first rank."""
        for unit, wrapped, waiting in self._units:
            shard = flat_shard(wrapped)
            if shard is not None:
                shard.untyped_storage().resize_(shard.nbytes)
                shard.zero_()  # torch pads shards to one length
            prefix = f"{unit}." if unit else ""
            pieces = {plain_name(f"{prefix}{name}"): piece for name, piece in flat_pieces(wrapped).items()}
            self.filler.send(waiting, pieces)


def _flat_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the flat parameter that holds each parameter of the user's model, by its name there."""
    for path, flat in model.named_parameters():
        for name in flat_parameter_names(flat):
            holder = path.rpartition(".")[0]
            yield plain_name(f"{holder}.{name}"), flat
