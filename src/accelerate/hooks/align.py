"""The hook that brings inputs and offloaded weights to the device of a module, and its way onto the modules of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..collectives.nested import find_device, send_to_device
from ..offload.places import META, Place, as_device
from ..offload.quantised import scales_name
from ..offload.store import PrefixedDataset
from ..offload.tensors import (
    TiedCache,
    address_of,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)
from .base import Arguments, ModelHook, add_hook_to_module, eager_only

SkipKeys = str | list[str] | None


class AlignDevicesHook(ModelHook):
    """Bring inputs, and weights that are offloaded, to the device of a module for the time of its forward.

    Args:
        execution_device: Where the module runs; inputs stay where they are without it.
        offload: Keep the weights on the meta device between calls, and read them from `weights_map`.
        io_same_device: Send the output to the device that the input came from.
        weights_map: Where offloaded weights are read; a copy on the CPU is made if it is not given.
        offload_buffers: Offload the buffers too.
        place_submodules: Act on the whole sub-tree, not on the module's own tensors only.
        skip_keys: Names of keyword arguments, and keys in them, that stay where they are.
        tied_params_map: The copies of tied weights that modules share. Its addresses must be those of tensors that
            something keeps alive, such as `weights_map`.
    """

    def __init__(
        self,
        execution_device: Place | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: SkipKeys = None,
        tied_params_map: TiedCache | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._borrowed: list[tuple[int, torch.device]] = []
        self._resolved: tuple[Place | None, torch.device] | None = None

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def _offloaded_names(self, module: nn.Module) -> list[str]:
        tensors = named_module_tensors(
            module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
        )
        return [name for name, _ in tensors]

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Put the tensors on the device of the module; or, to offload them, on the meta device."""
        if self.offload:
            self._send_away(module)
        elif self.execution_device is not None:
            for name, _ in list(named_module_tensors(module, recurse=self.place_submodules)):
                self._set(module, name, self.execution_device, tied=True)
        return module

    def _send_away(self, module: nn.Module) -> None:
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        names = self._offloaded_names(module)
        if self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in names}
        for name in names:
            self._set(module, name, META)
        if self.execution_device is None:
            return
        hidden = get_non_persistent_buffers(module, self.place_submodules, fqns=True) if self.offload_buffers else None
        for name, _ in list(module.named_buffers(recurse=self.place_submodules)):
            if hidden is None or name in hidden:
                self._set(module, name, self.execution_device, tied=True)

    def _set(
        self, module: nn.Module, name: str, device: Place, value: torch.Tensor | None = None, tied: bool = False
    ) -> None:
        cache = self.tied_params_map if tied else None
        scales = self._scales(name, value)
        # The allocator keeps what one layer leaves for the next: giving it back each time would stop the device.
        set_module_tensor_to_device(
            module, name, device, value, fp16_statistics=scales, tied_params_map=cache, clear_cache=False
        )

    def _scales(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        """Return the scales of a weight in 8 bits."""
        if value is None or value.dtype != torch.int8 or self.weights_map is None:
            return None
        return self.weights_map.get(scales_name(name))

    @eager_only
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Read the offloaded weights, and move the inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.execution_device is None:
            return args, kwargs
        device = self._device(self.execution_device)
        if self.offload and self.weights_map is not None:
            for name in self._offloaded_names(module):
                value = self.weights_map[name]
                self._borrow(value, device)
                self._set(module, name, device, value, tied=True)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _device(self, place: Place) -> torch.device:
        # Asking which accelerator an index means takes time, so it is asked again only for another place.
        if self._resolved is None or self._resolved[0] != place:
            self._resolved = (place, as_device(place))
        return self._resolved[1]

    def _borrow(self, value: torch.Tensor, device: torch.device) -> None:
        """Note that this call is the one that puts a tied weight on the device, and takes it off again."""
        address = address_of(value)
        copies = (self.tied_params_map or {}).get(address) if address is not None else None
        if address is not None and copies is not None and device not in copies:
            self._borrowed.append((address, device))

    @eager_only
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Send the weights away, and the output to where the input came from."""
        if self.offload:
            for name in self._offloaded_names(module):
                self._set(module, name, META)
            if type(module).__name__ == "Linear8bitLt":  # it keeps its weight a second time in its state
                module.state.SCB = None  # type: ignore[union-attr]
                module.state.CxB = None  # type: ignore[union-attr]
            for address, device in self._borrowed:
                (self.tied_params_map or {}).get(address, {}).pop(device, None)
            self._borrowed.clear()
        if self.io_same_device and self.input_device is not None:
            return send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring offloaded weights back to where they were before the hook; those from the meta device stay there."""
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules)) if self.offload else {}
        for name, device in self.original_devices.items():
            value = (self.weights_map or {}).get(name)
            if name in tensors and device != META and (value is not None or tensors[name].device != META):
                self._set(module, name, device, value)
        return module


@dataclass(frozen=True)
class _Settings:
    """What all hooks of one model have in common."""

    offload_buffers: bool = False
    skip_keys: SkipKeys = None
    preload: frozenset[str] = frozenset()
    tied: TiedCache | None = None
    weights_map: Mapping[str, torch.Tensor] | None = None

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
) -> None:
    """Put an `AlignDevicesHook` on every module of a sub-tree that holds tensors of its own.

    Args:
        module_name: The name of `module` in the model that `weights_map` belongs to.
        preload_module_classes: Class names of modules whose whole sub-tree is loaded at once, because they use the
            weights of their children without calling them.
    """
    preload = frozenset(preload_module_classes or ())
    settings = _Settings(offload_buffers, skip_keys, preload, tied_params_map, weights_map)
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
) -> None:
    """Put hooks on the blocks of a model, each with its own device, and one on the model that aligns its output.

    Args:
        execution_device: The device of each block by name, or one for all.
        offload: Whether each block is offloaded, by name, or one answer for all.
    """
    preload = frozenset(preload_module_classes or ())
    settings = _Settings(offload_buffers, skip_keys, preload, tied_params_map, weights_map)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            _attach_align(module, module_name, execution_device, True, settings, set())
            return
        add_hook_to_module(
            module, settings.hook(module_name, execution_device, io_same_device=True, place_submodules=True)
        )
        return
    names = (execution_device if isinstance(execution_device, Mapping) else offload).keys()  # type: ignore[union-attr]
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(names, execution_device)
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(names, offload)
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
