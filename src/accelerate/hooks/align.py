"""The hook that brings inputs and offloaded weights to the device of a module while it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.collectives.nested import find_device, send_to_device
from accelerate.hooks.base import Arguments, ModelHook
from accelerate.offload.places import HOST, META, Place, as_device
from accelerate.offload.read_ahead import ModuleWeights, ReadAhead
from accelerate.offload.store import scales_name
from accelerate.offload.tensors import (
    TiedCache,
    address_of,
    as_parameter,
    get_non_persistent_buffers,
    is_rebuilt,
    named_module_tensors,
    owner_of,
    set_module_tensor_to_device,
    table_of,
)
from accelerate.runtime.torch_private import eager_only

SkipKeys = str | list[str] | None


class WeightOnloader:
    """Put the weights of a module into it when the first of its callers enters, and take them out after the last.

    Several threads may run the module at a time: they use the same tensors, and none takes them away from another.

    Args:
        weights: What `engine` knows of the module.
        names: The tensors that are offloaded, as seen from the module.
    """

    def __init__(
        self, engine: ReadAhead, weights: ModuleWeights, module: nn.Module, names: list[str], device: torch.device
    ) -> None:
        self.engine, self.weights, self.device = engine, weights, device
        self._names = names
        self._slots = [owner_of(module, name) for name in names]
        self._empty: list[torch.Tensor] = []
        self._users = 0
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls,
        engine: ReadAhead,
        module: nn.Module,
        prefix: str,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> WeightOnloader | None:
        """Return the onloader of a module, or None where its weights have to be fetched one by one.

        Args:
            prefix: What the names of the module's tensors begin with in the store.
            tensors: The offloaded tensors of the module.
        """
        store = engine.store
        for name, tensor in tensors.items():
            stored = f"{prefix}{name}"
            # Quantised weights are made by their own classes, from several tensors.
            quantised = is_rebuilt(tensor) or (tensor.dtype == torch.int8 and scales_name(stored) in store)
            if quantised or stored not in store:
                return None
        if not tensors:
            return None
        weights = engine.register([(f"{prefix}{name}", tensor.dtype) for name, tensor in tensors.items()], device)
        return cls(engine, weights, module, list(tensors), device)

    def renew(self) -> None:
        """Take the weights from where the store has them now, unless they are in use."""
        with self._lock:
            if self._users == 0:
                self.engine, self.weights = self.engine.renew(self.weights)

    def onload(self) -> None:
        """Put the weights in."""
        tensors = self.engine.acquire(self.weights)
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._empty = [table_of(owner, key)[key] for owner, key in self._slots]
            with torch.no_grad():
                for (owner, key), tensor, empty in zip(self._slots, tensors, self._empty, strict=True):
                    if tensor.dtype != empty.dtype:  # the dtype of the model was changed since it was dispatched
                        tensor = tensor.to(empty.dtype)
                    table = table_of(owner, key)
                    table[key] = as_parameter(empty, tensor, self.device) if table is owner._parameters else tensor

    def offload(self) -> None:
        """Take the weights out."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for (owner, key), empty in zip(self._slots, self._empty, strict=True):
                    table = table_of(owner, key)
                    if empty.device != META:
                        bare = empty.detach().to(META)
                        table[key] = as_parameter(empty, bare, META) if table is owner._parameters else bare
                    else:
                        table[key] = empty
        self.engine.release(self.weights)

    @contextmanager
    def pinned(self) -> Iterator[dict[str, torch.Tensor]]:
        """Give the weights as the engine has them, which from now on never unloads them."""
        self.engine.pin(self.weights)
        tensors = self.engine.acquire(self.weights)
        try:
            yield dict(zip(self._names, tensors, strict=True))
        finally:
            self.engine.release(self.weights)


@dataclass
class _ForwardCall:
    """What one call of a module has begun and has to end."""

    input_device: torch.device | None
    onloader: WeightOnloader | None = None


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
        self._onloader: tuple[Mapping[str, torch.Tensor] | None, WeightOnloader] | None = None
        self._calls: dict[int, list[_ForwardCall]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model fetches its weights itself: threads and mapped files belong to one model.
        return {**self.__dict__, "_onloader": None, "_calls": {}}

    def use_onloader(self, onloader: WeightOnloader) -> None:
        """Take the weights from an engine that reads ahead, for as long as `weights_map` is what it is now."""
        self._onloader = (self.weights_map, onloader)

    def _onloader_on(self, device: torch.device) -> WeightOnloader | None:
        if self._onloader is None:
            return None
        source, onloader = self._onloader
        onloader.renew()
        usable = source is self.weights_map and onloader.device == device and onloader.weights.is_current()
        return onloader if usable else None

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def offloaded_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a module that are offloaded."""
        return named_module_tensors(
            module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Put the tensors on the device of the module; or, to offload them, on the meta device."""
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        device = self.execution_device
        if not self.offload:
            if device is not None:
                for name in tensors:
                    self._set(module, name, device, tied=True)
            return module
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        offloaded = [name for name, _ in self.offloaded_tensors(module)]
        if self.weights_map is None:
            self.weights_map = {name: tensors[name].detach().to("cpu") for name in offloaded}
        for name in offloaded:
            self._set(module, name, META)
        if device is not None:  # what is not offloaded stays there
            hidden = get_non_persistent_buffers(module, self.place_submodules, fqns=True)
            for name, _ in list(module.named_buffers(recurse=self.place_submodules)):
                if name in hidden or not self.offload_buffers:
                    self._set(module, name, device, tied=True)
        return module

    def _set(
        self, module: nn.Module, name: str, device: Place, value: torch.Tensor | None = None, tied: bool = False
    ) -> None:
        scales = None
        if value is not None and value.dtype == torch.int8 and self.weights_map is not None:
            scales = self.weights_map.get(scales_name(name))
        # The allocator keeps what one layer leaves for the next: giving it back each time would stop the device.
        set_module_tensor_to_device(
            module,
            name,
            device,
            value,
            fp16_statistics=scales,
            tied_params_map=self.tied_params_map if tied else None,
            clear_cache=False,
        )

    @eager_only
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Bring the offloaded weights, and move the inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        call = _ForwardCall(self.input_device)
        device = None if self.execution_device is None else self._device(self.execution_device)
        if device is not None and self.offload and self.weights_map is not None:
            call.onloader = self._onloader_on(device)
            if call.onloader is not None:
                call.onloader.onload()
            else:
                self._fetch(module, device, self.weights_map)
        self._calls.setdefault(threading.get_ident(), []).append(call)
        if device is None:
            return args, kwargs
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _fetch(self, module: nn.Module, device: torch.device, weights: Mapping[str, torch.Tensor]) -> None:
        """Put the weights in one by one."""
        for name in [name for name, _ in self.offloaded_tensors(module)]:
            value = weights[name]
            address = address_of(value)
            copies = (self.tied_params_map or {}).get(address) if address is not None else None
            if address is not None and copies is not None and device not in copies:
                # This call is the one that puts a tied weight on the device, and takes it off again.
                self._borrowed.append((address, device))
            self._set(module, name, device, value, tied=True)

    def _device(self, place: Place) -> torch.device:
        # Asking which accelerator an index means takes time, so it is asked again only for another place.
        if self._resolved is None or self._resolved[0] != place:
            self._resolved = (place, as_device(place))
        return self._resolved[1]

    @eager_only
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Send the weights away, and the output to where the input came from."""
        call = self._end_call(module)
        if self.io_same_device and call.input_device is not None:
            return send_to_device(output, call.input_device, skip_keys=self.skip_keys)
        return output

    @eager_only
    def abandon(self, module: nn.Module) -> None:
        """Send the weights away after a forward that raised an error."""
        self._end_call(module)

    def _end_call(self, module: nn.Module) -> _ForwardCall:
        """Send away the weights that this thread's last call of `pre_forward` brought, and return that call."""
        thread = threading.get_ident()
        calls = self._calls.get(thread)
        call = calls.pop() if calls else _ForwardCall(self.input_device)
        if not calls:
            self._calls.pop(thread, None)
        if call.onloader is not None:
            call.onloader.offload()
        elif self.offload:
            for name in [name for name, _ in self.offloaded_tensors(module)]:
                self._set(module, name, META)
            if type(module).__name__ == "Linear8bitLt":  # it keeps its weight a second time in its state
                kept: Any = module.state
                kept.SCB = kept.CB = None
            for address, device in self._borrowed:
                (self.tied_params_map or {}).get(address, {}).pop(device, None)
            self._borrowed.clear()
        return call

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Bring offloaded weights back to where they were before the hook; those from the meta device stay there."""
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules)) if self.offload else {}
        back = {name: device for name, device in self.original_devices.items() if name in tensors and device != META}
        for name in [name for name in back if tensors[name].device != META]:
            self._set(module, name, back.pop(name))
        if not back:  # files are not asked for: they may have been replaced, and the hook goes to load the model again
            return module
        # With what was written to the weights while the module ran on the CPU.
        onloader = self._onloader_on(torch.device(HOST))
        with onloader.pinned() if onloader is not None else nullcontext(self.weights_map or {}) as weights:
            for name, device in back.items():
                value = weights.get(name)
                if value is not None:
                    self._set(module, name, device, value)
        return module
