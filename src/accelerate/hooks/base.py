"""Hooks around the forward of a module: put on, taken off, and those that move or cast a whole module."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate._base import constants
from accelerate.collectives.nested import send_to_device
from accelerate.devices import registry
from accelerate.offload.places import Place, as_device
from accelerate.offload.tensors import check_device_same, move_module
from accelerate.runtime.torch_private import eager_only

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


def hooks_of(module: nn.Module) -> list[ModelHook]:
    """Return the hooks of a module in their order, each by itself."""
    pending, found = [getattr(module, "_hf_hook", None)], list[ModelHook]()
    while pending:
        hook = pending.pop()
        if isinstance(hook, SequentialHook):
            pending += reversed(hook.hooks)
        elif hook is not None:
            found.append(hook)
    return found


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
    # A graph module calls the forward of its class, which no other instance has.
    owner: Any = type(module) if _is_graph_module(module) else module
    owner.forward = forward


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
        old: Any = module._old_forward
        del module._old_forward
        if getattr(old, "__func__", None) is getattr(type(module), "forward", None):
            # The forward of the class itself: without an entry of its own the module can be copied and pickled again.
            module.__dict__.pop("forward", None)
        else:
            _set_forward(module, getattr(old, "__func__", old) if _is_graph_module(module) else old)
    for name in device_methods():
        module.__dict__.pop(name, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse=True)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take the hooks off a module and everything below it."""
    remove_hook_from_module(module, recurse=True)


_accelerate_added_attributes = ["to", *(backend.type for backend in registry.VENDORS)]
"""The methods that `dispatch_model` replaces on a model; other libraries read this list."""


def device_methods() -> list[str]:
    """Return the names of the methods that move a module: `to`, and one for every kind of hardware."""
    registered = (backend.type for backend in registry.all_backends())
    return list(dict.fromkeys((*_accelerate_added_attributes, *registered)))


class LayerwiseCastingHook(ModelHook):
    """Keep the weights of a module in `storage_dtype`, and in `compute_dtype` while its forward runs."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights to the dtype of storage."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Cast the weights to the dtype of computing."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast the weights back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a small dtype, and compute in a larger one.

    Args:
        skip_modules_pattern: Regular expressions; modules with a match in their dotted name keep their dtype.
        skip_modules_classes: Classes of modules that keep their dtype, with all below them.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    skipped = skip_modules_classes or ()

    def attach(current: nn.Module, name: str) -> None:
        if isinstance(current, skipped) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(current, constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(current, hook, append=True)
            return
        for key, child in current.named_children():
            attach(child, f"{name}.{key}" if name else key)

    attach(module, "")


class CpuOffload(ModelHook):
    """Keep a model on the CPU until its forward, then move it to its device, where it stays.

    Args:
        execution_device: Where the model runs; the accelerator of this host if not given.
        prev_module_hook: The handle of the model that ran before and makes room first.
    """

    def __init__(
        self, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = registry.default().value.device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU."""
        return move_module(module, torch.device("cpu"))

    @eager_only
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Send the model before it back to the CPU, and bring this one and its inputs to the device."""
        device = as_device(self.execution_device)
        if self.prev_module_hook is not None and _device_of(self.prev_module_hook.model).type != "cpu":
            self.prev_module_hook.offload()
        if check_device_same(_device_of(module), device):
            return args, kwargs
        move_module(module, device)
        return send_to_device(args, device), send_to_device(kwargs, device)


def _device_of(model: nn.Module) -> torch.device:
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


class UserCpuOffloadHook:
    """The user's handle of a model that waits on the CPU: send it back, or stop managing it."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model, which stays where it is."""
        remove_hook_from_module(self.model)
