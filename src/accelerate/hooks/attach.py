"""Hooks put on the modules of a model: by hand, or as a device map says."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.devices import registry
from accelerate.hooks.align import AlignDevicesHook, SkipKeys, WeightOnloader
from accelerate.hooks.base import (
    SequentialHook,
    add_hook_to_module,
    device_methods,
    hooks_of,
    remove_hook_from_module,
)
from accelerate.offload.places import DISK, HOST, META, Place, as_device, is_offload, lookup
from accelerate.offload.read_ahead import ReadAhead
from accelerate.offload.store import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    offload_state_dict,
    offloaded_weights,
    warn_of_other_weights,
)
from accelerate.offload.stored import FilePath
from accelerate.offload.tensors import (
    TiedCache,
    copy_to_host,
    find_tied_parameters,
    is_empty,
    named_module_tensors,
    owner_of,
    prune_tied_cache,
    retie_parameters,
    set_module_tensor_to_device,
    table_of,
    tied_cache,
)
from accelerate.offload.weight_files import has_offload_index, read_offload_index

logger = logging.getLogger(__name__)


class _HookAttacher:
    """Put hooks with common settings on the modules of one model."""

    def __init__(
        self,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        skip_keys: SkipKeys = None,
        preload: Iterable[str] | None = None,
        tied: TiedCache | None = None,
        offload_memory: int | str | None = None,
    ) -> None:
        self.weights_map, self.offload_buffers, self.skip_keys = weights_map, offload_buffers, skip_keys
        self.preload, self.tied = frozenset(preload or ()), tied
        # Of another mapping nobody knows whether it reads a file, or gives another tensor the next time.
        self.engine: ReadAhead | None = None
        if isinstance(weights_map, OffloadedWeightsLoader):
            self.engine = ReadAhead(weights_map, offload_memory)
        self.seen: set[int] = set()

    def hook(self, device: Place | None, **arguments: Any) -> AlignDevicesHook:
        return AlignDevicesHook(
            execution_device=device,
            offload_buffers=self.offload_buffers,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied,
            **arguments,
        )

    def attach_execution(self, module: nn.Module, device: Place) -> bool:
        """Bring inputs to a device in a sub-tree, from below, and return whether it has anything in its state dict."""
        whole = type(module).__name__ in self.preload
        below = [] if whole else [self.attach_execution(child, device) for child in module.children()]
        state = named_module_tensors(module, recurse=whole, remove_non_persistent=True)
        has_state = any(below) or next(state, None) is not None
        runs = type(module).forward is not nn.Module.forward  # a list of modules is never called
        if has_state and runs and not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, self.hook(device))
        return has_state

    def attach_align(self, module: nn.Module, name: str, device: Place | None, offload: bool) -> None:
        """Bring inputs and weights to a device in a sub-tree."""
        if id(module) in self.seen:
            return  # shared by two parents: one hook serves both
        self.seen.add(id(module))
        prefix = f"{name}." if name else ""
        whole = offload and type(module).__name__ in self.preload
        if whole or next(named_module_tensors(module), None) is not None:
            weights = self.weights_map
            if weights is not None:
                weights = PrefixedDataset(weights, prefix) if offload else None
            hook = self.hook(device, offload=offload, weights_map=weights, place_submodules=whole)
            add_hook_to_module(module, hook, append=True)
            if self.engine is not None and offload and device is not None:
                tensors = {key: tensor for key, tensor in hook.offloaded_tensors(module) if tensor.device == META}
                onloader = WeightOnloader.create(self.engine, module, prefix, tensors, as_device(device))
                if onloader is not None:
                    hook.use_onloader(onloader)
        if not whole:
            for key, child in module.named_children():
                self.attach_align(child, prefix + key, device, offload)

    def attach_blocks(
        self, module: nn.Module, name: str, devices: Mapping[str, Place | None], offloaded: Mapping[str, bool]
    ) -> None:
        """Bring inputs and weights to the device of each block, and the output of the model to where its input was."""
        root = name == ""
        if name in devices and name in offloaded:
            device = devices[name]
            if offloaded[name]:
                self.attach_align(module, name, device, True)
                present = getattr(module, "_hf_hook", None)
                if present is None:
                    add_hook_to_module(module, self.hook(device, io_same_device=root))
                elif root and isinstance(present, AlignDevicesHook):
                    present.io_same_device = True
            else:
                add_hook_to_module(module, self.hook(device, io_same_device=root, place_submodules=True))
            if device is not None:
                self.attach_execution(module, device)
        elif root:
            add_hook_to_module(module, self.hook(devices.get(""), io_same_device=True))
        for key, child in module.named_children():
            self.attach_blocks(child, f"{name}.{key}" if name else key, devices, offloaded)


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
    attacher = _HookAttacher(skip_keys=skip_keys, preload=preload_module_classes, tied=tied_params_map)
    attacher.attach_execution(module, execution_device)


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
    attacher = _HookAttacher(
        weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map, offload_memory
    )
    attacher.attach_align(module, module_name, execution_device, offload)


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
    attacher = _HookAttacher(
        weights_map, offload_buffers, skip_keys, preload_module_classes, tied_params_map, offload_memory
    )
    if isinstance(execution_device, Mapping):
        offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(execution_device, offload)
        attacher.attach_blocks(module, module_name, execution_device, offloaded)
    elif isinstance(offload, Mapping):
        attacher.attach_blocks(module, module_name, dict.fromkeys(offload, execution_device), offload)
    elif offload:
        attacher.attach_align(module, module_name, execution_device, True)
    else:
        add_hook_to_module(module, attacher.hook(execution_device, io_same_device=True, place_submodules=True))


def first_accelerator(device_map: Mapping[str, Place]) -> Place:
    """Return the first accelerator of a device map, where offloaded modules run; the CPU if there is none."""
    return next((place for place in device_map.values() if not is_offload(place)), HOST)


def take_off_dispatch(
    model: nn.Module,
    device_map: Mapping[str, Place],
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: FilePath | None,
    offload_index: Mapping[str, Any] | None,
) -> None:
    """Take the hooks of an earlier dispatch off a model, and bring the weights that the next one does not find itself.

    Args:
        device_map: The places that come next, with the sources of weights that are at hand for them.
    """
    offloaded = offloaded_weights(model)
    for module in list(model.modules()):
        hooks = hooks_of(module)
        others = [hook for hook in hooks if not isinstance(hook, AlignDevicesHook)]
        if len(others) == len(hooks):
            continue
        if not others:
            remove_hook_from_module(module)
            continue
        for hook in hooks:
            if isinstance(hook, AlignDevicesHook):
                hook.detach_hook(module)
        module._hf_hook = others[0] if len(others) == 1 else SequentialHook(*others)  # type: ignore[assignment]
    for name in device_methods():
        model.__dict__.pop(name, None)
    on_disk: Mapping[str, Any] = offload_index or {}
    if offload_index is None and offload_dir is not None and has_offload_index(offload_dir):
        on_disk = read_offload_index(offload_dir)
    for name, weight in offloaded.items():
        at_hand = on_disk if lookup(device_map, name) == DISK else state_dict or {}
        owner, key = owner_of(model, name)
        if name not in at_hand and is_empty(table_of(owner, key)[key]):
            set_module_tensor_to_device(model, name, HOST, weight.read(), clear_cache=False)


def _offloaded_places(main: Place) -> set[str]:
    """Return the places whose weights are brought to the main device: not the CPU, if that device computes in its memory."""
    kind = as_device(main).type
    if kind == HOST:
        return {DISK}
    backend = next((known for known in registry.all_backends() if known.type == kind), None)
    in_host_memory = backend is not None and backend.device(0).index is None  # so are single GPUs in it
    return {DISK} if in_host_memory else {DISK, HOST}


def weights_of_offloaded(
    model: nn.Module,
    device_map: Mapping[str, Place],
    main: Place,
    state_dict: Mapping[str, torch.Tensor] | None,
    offload_dir: FilePath | None,
    offload_index: Mapping[str, Any] | None,
) -> OffloadedWeightsLoader | None:
    """Return where the weights of offloaded modules are read, after writing those that have to be."""
    on_disk = [name for name, place in device_map.items() if place == DISK]
    on_cpu = [name for name, place in device_map.items() if str(place) == HOST]
    if on_disk and offload_dir is None and offload_index is None:
        raise ConfigurationError(
            f"The device map puts {on_disk!r} on the disk, and neither offload_dir nor offload_index says where. "
            "Pass offload_dir=, a folder with room for these weights."
        )
    if on_disk and offload_index is None and offload_dir is not None:
        _write_missing(model, on_disk, offload_dir)
    if state_dict is None and on_cpu and HOST in _offloaded_places(main):
        state_dict = copy_to_host(extract_submodules_state_dict(model.state_dict(), on_cpu))
    folder = offload_dir if on_disk and has_offload_index(offload_dir) else None
    if state_dict is None and folder is None and offload_index is None:
        return None
    device = main if offload_index is not None else None
    return OffloadedWeightsLoader(state_dict, save_folder=folder, index=offload_index, device=device)


def _write_missing(model: nn.Module, modules: list[str], folder: FilePath) -> None:
    """Write the weights of modules that the folder does not hold yet."""
    weights = extract_submodules_state_dict(model.state_dict(), modules)
    written = read_offload_index(folder) if has_offload_index(folder) else {}
    if written:
        warn_of_other_weights(folder, weights)
    missing = {name: weight for name, weight in weights.items() if name not in written}
    empty = [name for name, weight in missing.items() if weight.device == META]
    if empty:
        raise ConfigurationError(
            f"{empty!r} are to be on the disk, and they are neither in {os.fspath(folder)!r} nor in the model, where "
            "they are on the meta device. Load the checkpoint with `load_checkpoint_and_dispatch`."
        )
    if missing:
        offload_state_dict(folder, missing)


def hook_device_map(
    model: nn.Module,
    device_map: Mapping[str, Place],
    main: Place,
    weights: OffloadedWeightsLoader | None,
    offload_buffers: bool,
    skip_keys: SkipKeys,
    preload: Iterable[str] | None,
    offload_memory: int | str | None = None,
) -> None:
    """Put the hooks of a device map on a model.

    Args:
        offload_memory: What weights that are read ahead may take.
        main: Where modules on the CPU and the disk run.
        weights: Where the weights of offloaded modules are read.
    """
    offloaded = _offloaded_places(main)
    devices: dict[str, Place] = {name: main if is_offload(place) else place for name, place in device_map.items()}
    tied_names = find_tied_parameters(model)
    held = weights.state_dict if weights is not None else {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [name for group in tied_names for name in group]
    tied = tied_cache([*(parameters[name] for name in names), *(held[name] for name in names if name in held)])
    if weights is not None:
        weights.add_aliases(tied_names)
        # Tensors that stay on a device and have no data, because a tied weight of theirs is offloaded.
        for name, parameter in parameters.items():
            if parameter.device == META and name in weights and str(lookup(device_map, name)) not in offloaded:
                device = lookup(devices, name)
                if device is not None and as_device(device) != META:
                    set_module_tensor_to_device(model, name, device, weights[name])
    _place_single_tensors(model, devices, weights, skip_keys)
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": main, **devices},
        offload={name: str(place) in offloaded for name, place in device_map.items()},
        weights_map=weights,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload,
        tied_params_map=tied,
        offload_memory=offload_memory,
    )
    prune_tied_cache(tied, held.values())
    for group in tied_names:
        found = {model.get_parameter(name).device for name in group}
        if len(found) == 1 and META not in found:  # none is offloaded, or on another device than the rest
            retie_parameters(model, [group])


def _place_single_tensors(
    model: nn.Module, devices: Mapping[str, Place], weights: Mapping[str, torch.Tensor] | None, skip_keys: SkipKeys
) -> None:
    """Put tensors that a map names by themselves on their device, and bring the inputs of their module there.

    The parent of such a tensor has no entry of its own, so no other hook takes care of it. These tensors are not
    offloaded: they stay on the device that runs them.
    """
    modules = {name for name, _ in model.named_modules()}
    for name, device in devices.items():
        if name in modules:
            continue
        path, _, key = name.rpartition(".")
        if path not in modules or not isinstance(getattr(model.get_submodule(path), key, None), torch.Tensor):
            continue  # `check_device_map` warned about it
        owner = model.get_submodule(path)
        empty = getattr(owner, key).device == META
        set_module_tensor_to_device(owner, key, device, weights[name] if weights is not None and empty else None)
        if path and not hasattr(owner, "_hf_hook"):
            add_hook_to_module(owner, AlignDevicesHook(execution_device=device, skip_keys=skip_keys))


def guard_moves(model: nn.Module) -> None:
    """Let `.to` and the other methods that move a module warn or refuse on a model that was dispatched."""
    for name in device_methods():
        if callable(getattr(type(model), name, None)):
            model.__dict__[name] = functools.partial(_guarded_move, model, name)


def _guarded_move(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Warn about a move that the hooks do not know of, and refuse it where weights are not there to be moved."""
    if any(parameter.device == META for parameter in model.parameters()):
        raise UsageError(
            f"`.{method}()` was called on a model with offloaded weights: they are on the CPU or the disk, so there is "
            "nothing to move. Call `remove_hook_from_submodules(model)` first, or dispatch it with another device map."
        )
    logger.warning(
        "`.%s()` was called on a model that is dispatched over devices: its hooks still send inputs to the devices of the "
        "device map.",
        method,
    )
    return getattr(type(model), method)(model, *args, **kwargs)
