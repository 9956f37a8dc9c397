"""Version 1 of FSDP: wrappers that hold the parameters of a module as one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate.parallel.unwrap import inner_block, plain_name
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime.memory import trim_host_memory
from accelerate.runtime.torch_private_fsdp import flat_parameter_names, flat_pieces, flat_shard, is_flattened
from accelerate.strategies.base import StrategyContext
from accelerate.strategies.broadcast_weights import PendingTensor, WeightBroadcast, require_memory
from accelerate.strategies.fsdp.base import FSDPStrategy, ignored_modules, unit_names
from accelerate.strategies.sharded_state import model_state
from accelerate.strategies.tools import Groups, UnshardedParameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FSDP1Strategy(FSDPStrategy):
    """torch's `FullyShardedDataParallel`."""

    name: ClassVar[str] = "fsdp1"
    version: ClassVar[int] = 1

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._replaced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        scaler = self.precision.scaler
        if isinstance(scaler, SharedGradScaler) and self.runtime.is_distributed:
            # A rank sees the overflow of its own shard only.
            scaler.agree_on_overflow = True

    @property
    def _is_hybrid(self) -> bool:
        return "HYBRID" in str(getattr(self.plugin.sharding_strategy, "name", ""))

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Return the ranks over which weights are sharded, after those that hold copies where there are any."""
        from torch.distributed.device_mesh import init_device_mesh

        device, world = self.runtime.device.type, self.runtime.world_size
        layout = self.context.parallelism
        if layout is not None and layout.non_data_parallel_size > 1:
            raise ConfigurationError(
                f"{layout!r} splits layers or sequences, which FSDP 1 cannot be combined with. Set fsdp_version=2."
            )
        if not self._is_hybrid:
            return init_device_mesh(device, (world,))
        shards = self.runtime.local_world_size
        if layout is not None and layout.dp_shard_size and layout.dp_shard_size > 1:
            shards = layout.dp_shard_size
        axes = (MeshAxis.DP_REPLICATE.value, MeshAxis.DP_SHARD.value)
        return init_device_mesh(device, (world // shards, shards), mesh_dim_names=axes)

    def check_model(self, model: nn.Module, *, evaluation: bool) -> None:
        """Refuse a flat parameter of frozen and trained parameters, such as those of LoRA, which torch cannot train."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        plugin = self.plugin
        if plugin.use_orig_params or not self.runtime.is_distributed or isinstance(model, FullyShardedDataParallel):
            return
        units = unit_names(plugin, model)
        ignored = {parameter for module in ignored_modules(plugin, model) for parameter in module.parameters()}
        joined: dict[str, dict[bool, str]] = {}
        for path, parameter in model.named_parameters():
            if parameter not in ignored:
                name = plain_name(path)
                owner = max((unit for unit in units if name.startswith(f"{unit}.")), key=len, default="")
                joined.setdefault(owner, {}).setdefault(parameter.requires_grad, name)
        for names in joined.values():
            if len(names) > 1:
                raise ConfigurationError(
                    f"{type(model).__name__} has the frozen parameter {names[False]!r} and the trained parameter "
                    f"{names[True]!r} in the same FSDP unit, which FSDP 1 cannot join with use_orig_params=False. Set "
                    "use_orig_params=True or fsdp_version=2, or give the trained modules their own units, as PEFT's "
                    "fsdp_auto_wrap_policy does."
                )

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap the blocks that the plugin selects, children first, then the model."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        if isinstance(model, FullyShardedDataParallel):
            return model
        plugin = self.plugin
        names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
        unsharded = UnshardedParameters.of(model)
        options = self._options(model)
        weights = None
        if plugin.sync_module_states or plugin.cpu_ram_efficient_loading or self._is_hybrid:
            weights = _DeferredWeights(WeightBroadcast(model, self.runtime.device))
        for unit in unit_names(plugin, model):
            parent_name, _, child = unit.rpartition(".")
            parent = inner_block(model.get_submodule(parent_name))
            setattr(parent, child, self._wrap_unit(model.get_submodule(unit), unit, weights, options))
        wrapped = self._wrap_unit(model, "", weights, options)
        if weights is not None:
            weights.send()
        # A parameter that had no memory is a new one, also where it is not joined with others.
        by_name = {plain_name(name): parameter for name, parameter in wrapped.named_parameters()}
        for path, flat in wrapped.named_parameters():
            holder = path.rpartition(".")[0]
            by_name.update({plain_name(f"{holder}.{name}"): flat for name in flat_parameter_names(flat)})
        for parameter, name in names.items():
            new = by_name.get(name, parameter)
            if new is not parameter:
                self._replaced[parameter] = new
        unsharded.keep_on(wrapped)
        return wrapped

    def _wrap_unit(
        self, module: nn.Module, unit: str, weights: _DeferredWeights | None, options: dict[str, Any]
    ) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        if weights is None:
            require_memory(module, self.plugin.param_init_fn)
            self.place_unit(module)
            return FullyShardedDataParallel(module, **options)
        pending = weights.broadcast.allocate(unit)
        self.place_unit(module)
        wrapped = FullyShardedDataParallel(module, **options)
        weights.defer(unit, wrapped, pending)
        return wrapped

    def _options(self, model: nn.Module) -> dict[str, Any]:
        plugin = self.plugin
        return {
            "sharding_strategy": plugin.sharding_strategy,
            # On the CPU weights are where they would be moved to.
            "cpu_offload": None if self.runtime.device.type == "cpu" else plugin.cpu_offload,
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
        if not self.runtime.is_distributed:  # nothing is wrapped
            return super().replaced(before, after)
        return {old: self._replaced[old] for old in before if old in self._replaced}

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        suspend = getattr(model, "no_sync", None)
        return suspend() if suspend is not None else nullcontext()

    def groups_of(self, parameter: torch.Tensor) -> Groups:
        """Return the group of ranks over which a flat parameter, or a view into one, is split."""
        if str(getattr(self.plugin.sharding_strategy, "name", "")) == "NO_SHARD" or not is_flattened(parameter):
            return ()
        return (self.mesh.get_group(self.mesh.ndim - 1),)

    def sharded_weights(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict in shards; one unit at a time is made whole for it."""
        return model_state(model)


class _DeferredWeights:
    """The weights of rank 0, sent when all units are wrapped.

    torch joins the weights of a unit before it cuts them. Shards have no memory until then, so that a rank holds either
    its shards or one whole unit.
    """

    def __init__(self, broadcast: WeightBroadcast) -> None:
        self.broadcast = broadcast
        self._units: list[tuple[str, nn.Module, list[PendingTensor]]] = []

    def defer(self, unit: str, wrapped: nn.Module, pending: list[PendingTensor]) -> None:
        """Note what a unit waits for, and free the memory of its shard."""
        shard = flat_shard(wrapped)
        if shard is not None:
            shard.untyped_storage().resize_(0)
        self._units.append((unit, wrapped, pending))
        trim_host_memory()

    def send(self) -> None:
        """Give every shard memory and the values of rank 0."""
        for unit, wrapped, pending in self._units:
            shard = flat_shard(wrapped)
            if shard is not None:
                shard.untyped_storage().resize_(shard.nbytes)
                shard.zero_()  # torch pads shards to one length
            prefix = f"{unit}." if unit else ""
            pieces = {plain_name(f"{prefix}{name}"): piece for name, piece in flat_pieces(wrapped).items()}
            self.broadcast.send(pending, pieces)
