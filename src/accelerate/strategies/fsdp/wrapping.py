"""Which modules of a model are sharded on their own, for both versions of FSDP."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.config.plugins import fsdp_torch
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.parallel.activation_checkpoint import inner_block

Policy = Callable[..., bool]


def ignored_modules(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[nn.Module]:
    """Return the modules that the plugin leaves alone: given as they are, or by a pattern for their whole name.

    Raises:
        ConfigurationError: If nothing of the model matches the pattern.
    """
    given = plugin.ignored_modules
    if given is None:
        return []
    if not isinstance(given, str):
        return list(given)
    pattern = re.compile(given)
    found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    if not found:
        raise ConfigurationError(
            f"FullyShardedDataParallelPlugin(ignored_modules={given!r}) matches no module of {type(model).__name__}, "
            "whose whole name the pattern must match. Write a pattern such as '.*experts', or pass the modules."
        )
    return found


def ignored_parameters(
    plugin: FullyShardedDataParallelPlugin, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of the modules that are left alone, moved to the device where they are used."""
    modules = ignored_modules(plugin, model)
    for module in modules:
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(device)
    found = {parameter for module in modules for parameter in module.parameters()}
    if any(parameter.requires_grad for parameter in found):
        warn_once(
            "Modules that FSDP ignores have parameters to train: their gradients are not averaged between processes. "
            "Freeze them, or average the gradients yourself after each backward pass."
        )
    return found


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of modules, given as they are or by a pattern for their whole name, on a device."""
    if modules is None:
        return set()
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in modules for parameter in module.to(device).parameters()}


def unit_names(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[str]:
    """Return the names of the modules that are sharded on their own, children before parents, without the model.

    A module that shares a parameter with one outside of it is left to the module that holds both: a parameter can
    be in one group only, and the tie would be cut.
    """
    names = plugin.transformer_cls_names_to_wrap
    bound = fsdp_torch.bind_policy(
        plugin.auto_wrap_policy,
        model,
        [names] if isinstance(names, str) else names,
        plugin.min_num_params,
    )
    if bound is None:
        return []
    ignored = {id(module) for module in ignored_modules(plugin, model)}
    found: list[str] = []
    _select(model, "", _three_arguments(bound), ignored, found)
    outside = _tied_across(model)
    return [name for name in found if name and not any(_crosses(name, names) for names in outside)]


def block_names(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> list[str]:
    """Return the outermost of the modules that are sharded on their own: the blocks of the model."""
    names = unit_names(plugin, model)
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def prepare_policy(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a function that tells whether a module of the model is sharded on its own."""
    chosen = {id(inner_block(model.get_submodule(name))) for name in unit_names(plugin, model)}
    return lambda module: id(inner_block(module)) in chosen


def _three_arguments(policy: Policy) -> Policy:
    """Return a policy in torch's form, `policy(module, recurse, nonwrapped_numel)`; a plain question becomes one."""
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        return policy
    if len(parameters) == 1 and not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return lambda module, recurse, nonwrapped_numel: recurse or policy(module)
    return policy


def _select(module: nn.Module, name: str, policy: Policy, ignored: set[int], found: list[str]) -> int:
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


def _tied_across(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def _crosses(unit: str, aliases: list[str]) -> bool:
    inside = [alias.startswith(f"{unit}.") for alias in aliases]
    return any(inside) and not all(inside)
