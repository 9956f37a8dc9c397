"""What both versions of FSDP share: which modules are sharded on their own, and the steps around sharding."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate._base.enums import DistributedType, MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice, warn_once
from accelerate.checkpointing.parts import Part, Prepared
from accelerate.config.plugins import fsdp_torch
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.offload.tensors import find_tied_parameters, move_module, moves_in_place
from accelerate.parallel.compile import checkpoint_blocks, compile_regions_fsdp2, has_repeated_blocks
from accelerate.parallel.unwrap import extract_model_from_parallel, inner_block, plain_name
from accelerate.runtime.current import Runtime
from accelerate.runtime.torch_private_fsdp import held_back_gradients
from accelerate.strategies import tools
from accelerate.strategies.base import Capabilities, EngineRequest, Step, Strategy, StrategyContext
from accelerate.strategies.sharded_state import sharded_parts

FULL, LOCAL, SHARDED = "FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"
_POLICY_DTYPES = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


class FSDPStrategy(Strategy):
    """Each rank holds a part of the weights, gradients and optimizer state, and reads its own data."""

    engine: ClassVar[str | None] = "fsdp"
    caps: ClassVar[Capabilities] = Capabilities(holds_back_gradients=True, hides_open_gradients=True)
    version: ClassVar[int]

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.plugin = context.fsdp if context.fsdp is not None else FullyShardedDataParallelPlugin()
        dtype = _POLICY_DTYPES.get(self.precision.name)
        if dtype is not None:
            # Weights are gathered in half precision; gradients are reduced in single, as other engines do.
            self.plugin.set_mixed_precision({"param_dtype": dtype, "reduce_dtype": "fp32"})

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take the runs whose plugin asks for this version."""
        asked = getattr(request.engines.get("fsdp"), "fsdp_version", None)
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
        shard: tuple[Step, ...] = (self.shard,)
        if not self.runtime.is_distributed:
            shard = (self.place,) if place else ()
        return (
            self.raise_precision,
            *(() if evaluation else (self.convert,)),
            self.precision.wrap_forward,
            self.checkpoint_activations,
            self.compile_blocks,
            *shard,
            self.compile_whole,
        )

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model; version 2 does so through a function that programs may replace."""
        return self.wrap(model)

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

    def place_unit(self, module: nn.Module) -> None:
        """Move a module that is sharded next to the device, where torch cannot do it.

        torch lets parameters take over tensors of the device, which not every device's tensors allow.
        """
        if not moves_in_place(module, self.runtime.device):
            move_module(module, self.runtime.device)

    def scale_gradients(self, parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
        tools.scale_gradients(self.trained(parameters), factor)

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        trained = self.trained(parameters)
        return tools.clip_grad_norm(trained, max_norm, norm_type, self.runtime.device, groups_of=self.groups_of)

    def groups_of(self, parameter: torch.Tensor) -> tools.Groups:
        """Return the groups of ranks over which a parameter and its gradient are split."""
        return tools.split_groups(parameter)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        tools.clip_grad_value(self.trained(parameters), clip_value)

    def open_gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the full gradients that this rank has summed up in an open window, which FSDP keeps out of parameters.

        They are not those of other ranks: each has summed up its own share of the data. Ranks that share a layer bring
        its gradient together.
        """
        if not self.runtime.is_distributed:
            return super().open_gradients(model)
        found: dict[str, torch.Tensor] = {}
        names = tools.parameter_names(model)
        for unit, held in held_back_gradients(model):
            for key, own in held.read().items():
                name, gradient = _held_name(unit, key, names), self.gather_gradient(own)
                # Each unit of a weight that was tied after sharding has the gradient of its modules alone.
                found[name] = found[name] + gradient if name in found else gradient
        return found

    def set_open_gradients(self, model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Put gradients where the exchange at the end of the window finds them; an empty mapping ends the window."""
        if not self.runtime.is_distributed:
            super().set_open_gradients(model, gradients)
            return
        names = tools.parameter_names(model)
        parameters = {id(parameter): parameter for parameter in model.parameters()}
        for parameter in parameters.values():
            parameter.grad = None
        rest = dict(gradients)
        for unit, held in held_back_gradients(model):
            own: dict[Any, torch.Tensor] = {}
            for key in held.parameters():
                # A parameter in several units gets its gradient in the first of them alone.
                gradient = rest.pop(_held_name(unit, key, names), None)
                if gradient is not None:
                    own[key] = self.split_gradient(gradient, parameters.get(key))
            held.write(own)

    def gather_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the full gradient of this rank's data; every rank that holds a part of it calls this."""
        return tools.full(gradient)

    def split_gradient(self, gradient: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's part of a full gradient: before the exchange it is split over the ranks of its layer alone."""
        return tools.split_like(gradient, parameter, axes=(MeshAxis.TP,))

    def full_state_dict(self, model: nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights on the first rank and nothing on the others; every rank must call it.

        Tensors are gathered one after another, so that a rank holds one full tensor beside its shards.
        """
        if not self.runtime.is_distributed:
            return super().full_state_dict(model, unwrap=unwrap)
        return tools.gather_full(self.sharded_weights(model), keep=self.runtime.rank == 0)

    def sharded_weights(self, model: nn.Module) -> dict[str, Any]:
        """Return the model's state dict in shards."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        return inner.state_dict(keep_vars=True)

    def weight_parts(self, prepared: Prepared) -> list[Part]:
        """Return parts of models and optimizers that all ranks write together."""
        return sharded_parts(prepared, full=state_dict_kind(self.plugin) == FULL)


def _held_name(unit: str, key: Any, names: Mapping[int, str]) -> str:
    """Return the name in the user's model of a parameter that is known by its identity, or by its name in a unit."""
    return names[key] if isinstance(key, int) else plain_name(f"{unit}.{key}" if unit else key)


def state_dict_kind(plugin: Any) -> str:
    """Return the state dict type of a plugin, which holds it as text or as torch's enum."""
    given = plugin.state_dict_type
    kind = str(getattr(given, "name", given)).rpartition(".")[2].upper()
    if kind not in (FULL, LOCAL, SHARDED):
        raise ConfigurationError(
            f"The state dict type {given!r} is not known, so there is no layout for its files. "
            f"Write one of {FULL!r}, {SHARDED!r} or {LOCAL!r}."
        )
    return kind


# --- which modules are sharded on their own --------------------------------------------------------------------------


def unit_names(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[str]:
    """Return the names of the modules that are sharded on their own, children before parents, without the model.

    A module that shares a parameter with one outside of it is left to the module that holds both: a parameter can
    be in one group only, and the tie would be cut.
    """
    names = plugin.transformer_cls_names_to_wrap
    policy = fsdp_torch.bind_policy(
        plugin.auto_wrap_policy, model, [names] if isinstance(names, str) else names, plugin.min_num_params
    )
    if policy is None:
        return []
    ignored = {id(module) for module in ignored_modules(plugin, model)}
    found: list[str] = []
    _select(model, "", _three_arguments(policy), ignored, found)
    tied = find_tied_parameters(model)
    return [name for name in found if not any(_crosses(name, aliases) for aliases in tied)]


def block_names(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[str]:
    """Return the outermost of the modules that are sharded on their own: the blocks of the model."""
    names = unit_names(plugin, model)
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def ignored_modules(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[nn.Module]:
    """Return the modules that the plugin leaves alone: given as they are, or by a pattern for their whole name.

    Raises:
        ConfigurationError: If nothing of the model matches the pattern.
    """
    given = plugin.ignored_modules
    found = list(matching_modules(given, model))
    if isinstance(given, str) and not found:
        raise ConfigurationError(
            f"FullyShardedDataParallelPlugin(ignored_modules={given!r}) matches no module of {type(model).__name__}, "
            "whose whole name the pattern must match. Write a pattern such as '.*experts', or pass the modules."
        )
    return found


def matching_modules(modules: Iterable[nn.Module] | str | None, model: nn.Module) -> Iterator[nn.Module]:
    """Return modules that are given as they are, or by a pattern for their whole name in the model."""
    if isinstance(modules, str):
        pattern = re.compile(modules)
        return (module for name, module in model.named_modules() if pattern.fullmatch(name))
    return iter(modules or ())


def _three_arguments(policy: Callable[..., bool]) -> Callable[..., bool]:
    """Return a policy in torch's form, `policy(module, recurse, nonwrapped_numel)`; a plain question becomes one."""
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return policy
    if len(parameters) == 1 and not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return lambda module, recurse, nonwrapped_numel: recurse or policy(module)
    return policy


def _select(module: nn.Module, name: str, policy: Callable[..., bool], ignored: set[int], found: list[str]) -> int:
    """Add the modules to shard to `found` and return how many numbers they hold, as torch's own walk does."""
    block = inner_block(module)
    total = sum(parameter.numel() for parameter in block.parameters())
    if id(block) in ignored or not policy(module=block, recurse=True, nonwrapped_numel=total):
        return 0
    taken = sum(
        _select(child, f"{name}.{child_name}" if name else child_name, policy, ignored, found)
        for child_name, child in block.named_children()
    )
    if total and name and policy(module=block, recurse=False, nonwrapped_numel=total - taken):
        found.append(name)
        return total
    return taken


def _crosses(unit: str, aliases: list[str]) -> bool:
    """Return whether a parameter is both in a unit and outside of it."""
    inside = [alias.startswith(f"{unit}.") for alias in aliases]
    return any(inside) and not all(inside)
