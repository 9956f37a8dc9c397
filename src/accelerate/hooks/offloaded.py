"""Modules whose weights are offloaded: detected, brought back for a while, and read whole."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from accelerate.hooks.align import AlignDevicesHook
from accelerate.hooks.base import SequentialHook
from accelerate.offload.places import Place
from accelerate.offload.store import identity_of_stored
from accelerate.offload.tensors import (
    get_non_persistent_buffers,
    is_empty,
    named_module_tensors,
    set_module_tensor_to_device,
)

logger = logging.getLogger(__name__)


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook that offloads a module's weights, also where it is one of several."""
    hook = getattr(module, "_hf_hook", None)
    candidates = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((each for each in candidates if isinstance(each, AlignDevicesHook) and each.offload), None)


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
    if hook is not None:
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


@dataclass(frozen=True)
class OffloadedWeight:
    """One weight that is elsewhere: read when it is asked for, and known as the same under all its names.

    Args:
        like: What the model has in its place: shape and dtype without data.
    """

    source: Mapping[str, torch.Tensor]
    key: str
    like: torch.Tensor

    def read(self) -> torch.Tensor:
        """Return the weight on the CPU in the dtype that the model has it in; one of a file is mapped where it can be."""
        value = self.source[self.key].detach().cpu()
        return value.to(self.like.dtype) if value.is_floating_point() else value

    @property
    def identity(self) -> Hashable | None:
        """Return what two names of one stored weight have in common, None where that cannot be told."""
        return identity_of_stored(self.source, self.key)


def offloaded_weights(model: nn.Module) -> dict[str, OffloadedWeight]:
    """Return the weights of a model that its hooks keep elsewhere, by the names of its state dict."""
    found: dict[str, OffloadedWeight] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        hook = offloading_hook(module)
        if hook is None or hook.weights_map is None:
            continue
        below = hook.place_submodules
        parameters = module.named_parameters(recurse=below, remove_duplicate=False)
        for key, tensor in chain(parameters, module.named_buffers(recurse=below, remove_duplicate=False)):
            if is_empty(tensor) and key in hook.weights_map:
                found[f"{prefix}.{key}" if prefix else key] = OffloadedWeight(hook.weights_map, key, tensor)
    return found
