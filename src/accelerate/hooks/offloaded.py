"""Modules whose weights are offloaded: detected, brought back for a while, read whole, and taken off their hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accelerate.hooks.align import AlignDevicesHook
from accelerate.offload.places import Place
from accelerate.offload.store import offloading_hook
from accelerate.offload.tensors import (
    get_non_persistent_buffers,
    is_empty,
    named_module_tensors,
    set_module_tensor_to_device,
)

logger = logging.getLogger(__name__)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether the weights of this very module, not of its children, are offloaded."""
    return offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Place | None = None) -> Iterator[None]:
    """Bring the parameters of a module to a device, and send them back at the end.

    Args:
        execution_device: Where to; without it, offloaded parameters come to the device that runs the module.
    """
    hook = offloading_hook(module)
    if isinstance(hook, AlignDevicesHook):
        usual = hook.execution_device
        hook.execution_device = usual if execution_device is None else execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = usual
        return
    if execution_device is None:
        yield
        return
    before = dict(module.named_parameters(recurse=False))
    try:
        for name in before:
            set_module_tensor_to_device(module, name, execution_device, clear_cache=False)
        yield
    finally:
        for name, now in dict(module.named_parameters(recurse=False)).items():
            # What was changed on the device is kept; from the meta device nothing can come back.
            if is_empty(now):
                module._parameters[name] = before[name]
            elif name in before:
                set_module_tensor_to_device(module, name, before[name].device, clear_cache=False)


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Place = "cpu"
) -> dict[str, Any]:
    """Fill the entries of `state_dict` that belong to an offloaded module, and return it.

    Args:
        module_name: The full name of one tensor of the module; the rest of its path names the module.
    """
    prefix = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload):
        for key, tensor in module.state_dict().items():
            name = f"{prefix}.{key}" if prefix else key
            if name in state_dict:
                state_dict[name] = tensor
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the whole state dict of a model on the CPU, whatever device or file its weights are on."""
    state_dict: dict[str, Any] = dict(model.state_dict())
    for prefix, module in model.named_modules():
        hook = offloading_hook(module)
        if hook is None:
            continue
        with align_module_device(module, "cpu"):
            hidden = get_non_persistent_buffers(module, recurse=hook.place_submodules, fqns=True)
            for key, tensor in named_module_tensors(module, recurse=hook.place_submodules):
                name = f"{prefix}.{key}" if prefix else key
                if key not in hidden:
                    state_dict[name] = tensor.detach()
    # A shared module was visited under one of its names: the others get the tensors found there.
    modules: dict[int, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), []).append(f"{prefix}." if prefix else "")
    for first, *others in modules.values():
        for other in others:
            for name in [name for name in state_dict if name.startswith(other) and is_empty(state_dict[name])]:
                state_dict[name] = state_dict.get(first + name.removeprefix(other), state_dict[name])
    empty = [name for name, value in state_dict.items() if is_empty(value)]
    if empty:
        logger.warning("These entries have no data and were left out of the state dict: %s.", ", ".join(empty))
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
        if not is_empty(value)
    }
