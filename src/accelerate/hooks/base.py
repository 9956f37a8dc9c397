"""A hook around the forward of a module, put on and taken off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate.devices import registry

M = TypeVar("M", bound=nn.Module)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ModelHook:
    """Run code before and after the forward of a module. Override what is needed.

    Attributes:
        no_grad: Run the forward without gradients.
    """

    no_grad: bool = False

    def init_hook(self, module: Any) -> Any:
        """Prepare a module when the hook is put on it, and return the module."""
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments that the forward gets."""
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        """Return what the caller of the forward gets."""
        return output

    def abandon(self, module: Any) -> None:
        """Undo `pre_forward` after a forward that raised an error, for which `post_forward` is not called."""

    def detach_hook(self, module: Any) -> Any:
        """Undo `init_hook` when the hook is taken off, and return the module."""
        return module


class SequentialHook(ModelHook):
    """Run several hooks in their order, before and after the forward."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: Any) -> Any:
        """Prepare the module by every hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Arguments:
        """Pass the arguments through every hook."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        """Pass the output through every hook, in the same order."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def abandon(self, module: Any) -> None:
        """Let every hook undo its part."""
        for hook in self.hooks:
            _abandon(hook, module)

    def detach_hook(self, module: Any) -> Any:
        """Take every hook off."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: M, hook: ModelHook, append: bool = False) -> M:
    """Put a hook on a module, and return the module.

    The hook is found as `module._hf_hook`, the forward without it as `module._old_forward`.

    Args:
        append: Run the hook after those that are there, instead of replacing them.
    """
    present = getattr(module, "_hf_hook", None)
    if not hasattr(module, "_old_forward"):
        module._old_forward = module.forward  # type: ignore[assignment]
    hooked = hook.init_hook(module)
    joined = SequentialHook(present, hook) if append and present is not None else hook
    hooked._hf_hook = joined
    _set_forward(hooked, functools.update_wrapper(functools.partial(_hooked_forward, hooked), hooked._old_forward))
    return hooked  # type: ignore[no-any-return]


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        if hook.no_grad:
            with torch.no_grad():
                output = module._old_forward(*args, **kwargs)
        else:
            output = module._old_forward(*args, **kwargs)
    except BaseException:
        _abandon(hook, module)
        raise
    return hook.post_forward(module, output)


def _abandon(hook: Any, module: Any) -> None:
    # Hooks of other libraries need not know of it.
    undo = getattr(hook, "abandon", None)
    if undo is not None:
        undo(module)


def _is_graph_module(module: nn.Module) -> bool:
    # By name: torch.fx gives every graph module a class of its own, and importing it here would cost time.
    return any(
        base.__name__ == "GraphModule" and base.__module__.startswith("torch.fx") for base in type(module).__mro__
    )


def _set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    if _is_graph_module(module):
        # A graph module calls the forward of its class, which no other instance has.
        type(module).forward = forward
    else:
        module.forward = forward


def remove_hook_from_module(module: M, recurse: bool = False) -> M:
    """Take the hook off a module, with its forward and its `.to` as they were, and return the module.

    Args:
        recurse: Take the hooks off all its children too.
    """
    hook: ModelHook | None = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
        del module._hf_hook
    if hasattr(module, "_old_forward"):
        _restore_forward(module)
    for name in device_methods():
        module.__dict__.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def _restore_forward(module: nn.Module) -> None:
    old: Any = module._old_forward
    del module._old_forward
    if getattr(old, "__func__", None) is getattr(type(module), "forward", None):
        # The forward of the class itself: without an entry of its own the module can be copied and pickled again.
        module.__dict__.pop("forward", None)
    elif _is_graph_module(module):
        _set_forward(module, getattr(old, "__func__", old))
    else:
        _set_forward(module, old)


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and everything below it."""
    remove_hook_from_module(module, recurse=True)


def device_methods() -> list[str]:
    """Return the names of the methods that move a module: `to`, and one for every kind of hardware."""
    return ["to", *(backend.type for backend in registry.all_backends())]
