"""The hook that brings inputs and offloaded weights to the device of a module."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.collectives.nested import find_device, send_to_device
from accelerate.hooks.base import Arguments, ModelHook
from accelerate.hooks.visits import Visit
from accelerate.offload.places import HOST, META, Place, as_device
from accelerate.offload.quantised import scales_name
from accelerate.offload.tensors import (
    TiedCache,
    address_of,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)
from accelerate.runtime.eager import eager_only

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
        self._visit: tuple[Mapping[str, torch.Tensor] | None, Visit] | None = None
        self._calls: dict[int, list[_Call]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model fetches its weights itself: threads and mapped files belong to one model.
        return {**self.__dict__, "_visit": None, "_calls": {}}

    def read_ahead(self, visit: Visit) -> None:
        """Take the weights from an engine that reads ahead, for as long as `weights_map` is what it is now."""
        self._visit = (self.weights_map, visit)

    def _visit_on(self, device: torch.device) -> Visit | None:
        if self._visit is None:
            return None
        source, visit = self._visit
        return visit if source is self.weights_map and visit.device == device and visit.is_current() else None

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def offloaded_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a module that are offloaded."""
        return named_module_tensors(
            module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
        )

    def _offloaded_names(self, module: nn.Module) -> list[str]:
        return [name for name, _ in self.offloaded_tensors(module)]

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
        """Bring the offloaded weights, and move the inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        call = _Call(self.input_device)
        if self.execution_device is None:
            self._calls.setdefault(threading.get_ident(), []).append(call)
            return args, kwargs
        device = self._device(self.execution_device)
        if self.offload and self.weights_map is not None:
            call.visit = self._visit_on(device)
            if call.visit is not None:
                call.visit.open()
            else:
                self._read(module, device, self.weights_map)
        self._calls.setdefault(threading.get_ident(), []).append(call)
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _read(self, module: nn.Module, device: torch.device, weights: Mapping[str, torch.Tensor]) -> None:
        for name in self._offloaded_names(module):
            value = weights[name]
            self._borrow(value, device)
            self._set(module, name, device, value, tied=True)

    def _ended_call(self) -> _Call:
        """Return what this thread's last call of `pre_forward` began."""
        thread = threading.get_ident()
        calls = self._calls.get(thread)
        if not calls:
            return _Call(self.input_device)
        call = calls.pop()
        if not calls:
            self._calls.pop(thread, None)
        return call

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
        call = self._ended_call()
        self._send_back(module, call)
        if self.io_same_device and call.input_device is not None:
            return send_to_device(output, call.input_device, skip_keys=self.skip_keys)
        return output

    @eager_only
    def abandon(self, module: nn.Module) -> None:
        """Send the weights away after a forward that raised an error."""
        self._send_back(module, self._ended_call())

    def _send_back(self, module: nn.Module, call: _Call) -> None:
        if call.visit is not None:
            call.visit.close()
        elif self.offload:
            for name in self._offloaded_names(module):
                self._set(module, name, META)
            if type(module).__name__ == "Linear8bitLt":  # it keeps its weight a second time in its state
                kept: Any = module.state
                kept.SCB = kept.CB = None
            for address, device in self._borrowed:
                (self.tied_params_map or {}).get(address, {}).pop(device, None)
            self._borrowed.clear()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring offloaded weights back to where they were before the hook; those from the meta device stay there."""
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules)) if self.offload else {}
        back = {name: device for name, device in self.original_devices.items() if name in tensors and device != META}
        if not back:
            return module
        with self._last_values() as weights:
            for name, device in back.items():
                value = weights.get(name)
                if value is not None or tensors[name].device != META:
                    self._set(module, name, device, value)
        return module

    @contextmanager
    def _last_values(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Give the weights of the module, with what was written to them while it ran on the CPU."""
        visit = self._visit_on(torch.device(HOST))
        if visit is None:
            yield self.weights_map or {}
            return
        with visit.kept() as weights:
            yield weights


@dataclass
class _Call:
    """What one call of a module has begun and has to end."""

    input_device: torch.device | None
    visit: Visit | None = None
