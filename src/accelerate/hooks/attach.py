"""Hooks that align devices, put on the modules of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from accelerate.hooks.align import AlignDevicesHook, SkipKeys
from accelerate.hooks.base import add_hook_to_module
from accelerate.hooks.visits import make_visit
from accelerate.offload.places import META, Place, as_device
from accelerate.offload.read_ahead import ReadAhead
from accelerate.offload.store import OffloadedWeightsLoader, PrefixedDataset
from accelerate.offload.tensors import TiedCache, named_module_tensors


@dataclass(frozen=True)
class _Settings:
    """What all hooks of one model have in common."""

    offload_buffers: bool = False
    skip_keys: SkipKeys = None
    preload: frozenset[str] = frozenset()
    tied: TiedCache | None = None
    weights_map: Mapping[str, torch.Tensor] | None = None
    engine: ReadAhead | None = None

    def hook(self, name: str, device: Place | None, **arguments: Any) -> AlignDevicesHook:
        weights_map = self.weights_map
        if weights_map is not None:
            weights_map = PrefixedDataset(weights_map, f"{name}." if name else "")
        return AlignDevicesHook(
            execution_device=device,
            weights_map=weights_map if arguments.get("offload") else None,
            offload_buffers=self.offload_buffers,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied,
            **arguments,
        )

    def is_preloaded(self, module: nn.Module) -> bool:
        return type(module).__name__ in self.preload

    def read_ahead(self, module: nn.Module, name: str, hook: AlignDevicesHook) -> None:
        """Let the weights of a module come before it runs."""
        if self.engine is None or not hook.offload or hook.execution_device is None:
            return
        tensors = {key: tensor for key, tensor in hook.offloaded_tensors(module) if tensor.device == META}
        visit = make_visit(self.engine, module, f"{name}." if name else "", tensors, as_device(hook.execution_device))
        if visit is not None:
            hook.read_ahead(visit)


def _engine(weights: Mapping[str, torch.Tensor] | None, offload_memory: int | str | None) -> ReadAhead | None:
    # Of another mapping nobody knows whether it reads a file, or gives another tensor the next time.
    return ReadAhead(weights, offload_memory) if isinstance(weights, OffloadedWeightsLoader) else None


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Place,
    skip_keys: SkipKeys = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedCache | None = None,
) -> None:
    """Bring the inputs of every module with tensors to a device, where no hook does so yet.

    Args:
        preload_module_classes: Class names of modules below which no hook is needed.
    """
    settings = _Settings(skip_keys=skip_keys, preload=frozenset(preload_module_classes or ()), tied=tied_params_map)
    _attach_execution(module, execution_device, settings)


def _attach_execution(module: nn.Module, device: Place, settings: _Settings) -> bool:
    """Put hooks on a sub-tree from below, and return whether it has anything in its state dict."""
    whole = settings.is_preloaded(module)
    below = [] if whole else [_attach_execution(child, device, settings) for child in module.children()]
    has_state = any(below) or _has_state(module, recurse=whole)
    runs = type(module).forward is not nn.Module.forward  # a list of modules is never called
    if has_state and runs and not hasattr(module, "_hf_hook"):
        add_hook_to_module(module, settings.hook("", device))
    return has_state


def _has_state(module: nn.Module, recurse: bool) -> bool:
    tensors = named_module_tensors(module, recurse=recurse, remove_non_persistent=True)
    return next(tensors, None) is not None


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Place | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedCache | None = None,
    offload_memory: int | str | None = None,
) -> None:
    """Put an `AlignDevicesHook` on every module of a sub-tree that holds tensors of its own.

    Args:
        offload_memory: What weights that are read ahead may take, if `weights_map` is an `OffloadedWeightsLoader`.
        module_name: The name of `module` in the model that `weights_map` belongs to.
        preload_module_classes: Class names of modules whose whole sub-tree is loaded at once, because they use the
            weights of their children without calling them.
    """
    preload = frozenset(preload_module_classes or ())
    engine = _engine(weights_map, offload_memory)
    settings = _Settings(offload_buffers, skip_keys, preload, tied_params_map, weights_map, engine)
    _attach_align(module, module_name, execution_device, offload, settings, set())


def _attach_align(
    module: nn.Module, name: str, device: Place | None, offload: bool, settings: _Settings, seen: set[int]
) -> None:
    if id(module) in seen:
        return  # shared by two parents: one hook serves both
    seen.add(id(module))
    whole = offload and settings.is_preloaded(module)
    if whole or next(named_module_tensors(module), None) is not None:
        hook = settings.hook(name, device, offload=offload, place_submodules=whole)
        add_hook_to_module(module, hook, append=True)
        settings.read_ahead(module, name, hook)
    if whole:
        return
    for key, child in module.named_children():
        _attach_align(child, f"{name}.{key}" if name else key, device, offload, settings, seen)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Place | Mapping[str, Place] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: Iterable[str] | None = None,
    tied_params_map: TiedCache | None = None,
    offload_memory: int | str | None = None,
) -> None:
    """Put hooks on the blocks of a model, each with its own device, and one on the model that aligns its output.

    Args:
        execution_device: The device of each block by name, or one for all.
        offload: Whether each block is offloaded, by name, or one answer for all.
        offload_memory: What weights that are read ahead may take, if `weights_map` is an `OffloadedWeightsLoader`.
    """
    preload = frozenset(preload_module_classes or ())
    engine = _engine(weights_map, offload_memory)
    settings = _Settings(offload_buffers, skip_keys, preload, tied_params_map, weights_map, engine)
    if isinstance(execution_device, Mapping):
        devices: Mapping[str, Place | None] = execution_device
        offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    elif isinstance(offload, Mapping):
        devices, offloaded = dict.fromkeys(offload, execution_device), offload
    else:
        if offload:
            _attach_align(module, module_name, execution_device, True, settings, set())
            return
        add_hook_to_module(
            module, settings.hook(module_name, execution_device, io_same_device=True, place_submodules=True)
        )
        return
    _attach_blocks(module, module_name, devices, offloaded, settings, set())


def _attach_blocks(
    module: nn.Module,
    name: str,
    devices: Mapping[str, Place | None],
    offloaded: Mapping[str, bool],
    settings: _Settings,
    seen: set[int],
) -> None:
    root = name == ""
    if name in devices and name in offloaded:
        _attach_block(module, name, devices[name], offloaded[name], settings, seen)
    elif root:
        add_hook_to_module(module, settings.hook(name, devices.get(""), io_same_device=True))
    for key, child in module.named_children():
        _attach_blocks(child, f"{name}.{key}" if name else key, devices, offloaded, settings, seen)


def _attach_block(
    module: nn.Module, name: str, device: Place | None, offload: bool, settings: _Settings, seen: set[int]
) -> None:
    root = name == ""
    if not offload:
        add_hook_to_module(module, settings.hook(name, device, io_same_device=root, place_submodules=True))
    else:
        _attach_align(module, name, device, True, settings, seen)
        present = getattr(module, "_hf_hook", None)
        if present is None:
            add_hook_to_module(module, settings.hook(name, device, io_same_device=root))
        elif root and isinstance(present, AlignDevicesHook):
            present.io_same_device = True
    if device is not None:
        _attach_execution(module, device, replace(settings, weights_map=None))
