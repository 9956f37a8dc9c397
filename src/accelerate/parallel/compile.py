"""Steps on the blocks of a model: compile them, and compute their activations again in the backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from accelerate.parallel.unwrap import inner_block
from accelerate.runtime.torch_private import checkpoint_activations


def is_repeated_blocks(module: torch.nn.Module) -> bool:
    """Return whether `module` is a list of blocks of one class."""
    return (
        isinstance(module, torch.nn.ModuleList)
        and len(module) > 0
        and all(type(block) is type(module[0]) for block in module)
    )


def has_repeated_blocks(module: torch.nn.Module) -> bool:
    """Return whether `module` holds a list of blocks of one class."""
    return any(is_repeated_blocks(child) for child in module.modules())


def compile_module(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile a model as a whole."""
    return cast(torch.nn.Module, torch.compile(module, **compile_kwargs))


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile the repeated blocks of a model, and the modules outside of them, one by one.

    All blocks of one class share a compilation, so the cold start costs one block instead of the whole model. The
    result shares its parameters with `module`, which stays as it was and is found again by unwrapping. A model without
    repeated blocks is compiled as a whole.
    """
    if not has_repeated_blocks(module):
        return compile_module(module, **compile_kwargs)
    return _with_compiled_blocks(module, compile_kwargs)


def _with_compiled_blocks(module: torch.nn.Module, compile_kwargs: dict[str, Any]) -> torch.nn.Module:
    twin = copy.copy(module)
    _replace_children(twin, lambda child: _compiled_child(child, compile_kwargs))
    for name, value in list(twin.__dict__.items()):
        # A bound method kept on the instance (a wrapped forward, a hook) must act on the twin.
        rebound = _rebind(value, module, twin)
        if rebound is not value:
            twin.__dict__[name] = rebound
    twin.__dict__["_orig_mod"] = module
    return twin


def _compiled_child(child: torch.nn.Module, compile_kwargs: dict[str, Any]) -> torch.nn.Module:
    if is_repeated_blocks(child):
        twin = copy.copy(child)
        _replace_children(twin, lambda block: compile_module(block, **compile_kwargs))
        return twin
    if has_repeated_blocks(child) or not _has_forward(child):
        return _with_compiled_blocks(child, compile_kwargs)
    return compile_module(child, **compile_kwargs)


def _replace_children(twin: torch.nn.Module, replace: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    replaced = {id(child): replace(child) for child in twin.children()}
    # A new dictionary, because the original keeps its uncompiled children. `named_children` skips None and further names
    # of a child.
    twin.__dict__["_modules"] = {name: replaced.get(id(child)) for name, child in twin._modules.items()}


def _has_forward(module: torch.nn.Module) -> bool:
    # Containers such as `ModuleList` are read, not called.
    return type(module).forward is not torch.nn.Module.forward


def _rebind(value: Any, old: object, new: object) -> Any:
    if getattr(value, "__self__", None) is old and hasattr(value, "__func__"):
        return value.__func__.__get__(new)
    wrapped = getattr(value, "__wrapped__", None)
    if wrapped is not None and getattr(wrapped, "__self__", None) is old:
        clone = copy.copy(value)
        clone.__wrapped__ = wrapped.__func__.__get__(new)
        return clone
    return value


def compile_regions_deepspeed(module: torch.nn.Module, **compile_kwargs: Any) -> None:
    """Compile the repeated blocks of a model one by one in place, for engines that hold on to the model itself."""
    for blocks in [child for child in module.modules() if is_repeated_blocks(child)]:
        for block in blocks.children():
            block.compile(**compile_kwargs)


def compile_regions_fsdp2(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile the repeated blocks of a model, and the modules outside of them, in place; returns the model.

    Call it before the blocks are sharded. A model without repeated blocks is compiled as a whole.
    """
    if _has_forward(module) and not has_repeated_blocks(module):
        module.compile(**compile_kwargs)
        return module
    for child in module.children():
        if is_repeated_blocks(module):
            child.compile(**compile_kwargs)
        else:
            compile_regions_fsdp2(child, **compile_kwargs)
    return module


def checkpoint_blocks(model: torch.nn.Module, names: Iterable[str], *, offload: bool = False) -> torch.nn.Module:
    """Wrap blocks so that their activations are not kept; returns the same model.

    Names in state dicts do not change. A block that is wrapped already stays as it is.

    Args:
        names: Dotted names of the blocks.
        offload: Keep what enters a block on the CPU until the backward pass.
    """
    for name in names:
        block = model.get_submodule(name)
        if block is not inner_block(block):
            continue
        parent, _, child = name.rpartition(".")
        setattr(inner_block(model.get_submodule(parent)), child, checkpoint_activations(block, offload=offload))
    return model
