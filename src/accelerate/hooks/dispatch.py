"""A device map carried out: weights to their places, and hooks that make the model run from there."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.devices import registry
from accelerate.hooks.align import AlignDevicesHook, SkipKeys
from accelerate.hooks.attach import attach_align_device_hook_on_blocks
from accelerate.hooks.base import add_hook_to_module, device_methods
from accelerate.offload.places import DISK, HOST, META, Place, as_device, is_offload, lookup
from accelerate.offload.store import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    has_offload_index,
    offload_state_dict,
    read_offload_index,
)
from accelerate.offload.tensors import set_module_tensor_to_device
from accelerate.offload.ties import find_tied_parameters, keep_alive_only, on_host, retie_parameters, shared_weights

FilePath = str | os.PathLike[str]


def first_accelerator(device_map: Mapping[str, Place]) -> Place:
    """Return the first accelerator of a device map, where offloaded modules run; the CPU if there is none."""
    return next((place for place in device_map.values() if not is_offload(place)), HOST)


def _offloaded_places(main: Place) -> set[str]:
    """Return the places whose weights visit the main device: not the CPU, if that device computes in its memory."""
    kind = as_device(main).type
    backend = next((known for known in registry.all_backends() if known.type == kind), None)
    in_host_memory = backend is not None and backend.device(0).index is None  # so are the CPU and single GPUs in it
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
        state_dict = on_host(extract_submodules_state_dict(model.state_dict(), on_cpu))
    folder = offload_dir if on_disk and has_offload_index(offload_dir) else None
    if state_dict is None and folder is None and offload_index is None:
        return None
    device = main if offload_index is not None else None
    return OffloadedWeightsLoader(state_dict, save_folder=folder, index=offload_index, device=device)


def _write_missing(model: nn.Module, modules: list[str], folder: FilePath) -> None:
    """Write the weights of modules that the folder does not hold yet."""
    weights = extract_submodules_state_dict(model.state_dict(), modules)
    written = read_offload_index(folder) if has_offload_index(folder) else {}
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
    tied = shared_weights({name: parameters[name] for group in tied_names for name in group})
    tied.update(shared_weights({name: held[name] for group in tied_names for name in group if name in held}))
    if weights is not None:
        weights.add_aliases(tied_names)
        _fetch_empty(model, device_map, devices, offloaded, weights)
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
    keep_alive_only(tied, held.values())
    retie_parameters(model, [group for group in tied_names if _lies_together(model, group)])


def _fetch_empty(
    model: nn.Module,
    device_map: Mapping[str, Place],
    devices: Mapping[str, Place],
    offloaded: set[str],
    weights: OffloadedWeightsLoader,
) -> None:
    """Give data to tensors that stay on a device and have none, because a tied weight of theirs is offloaded."""
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter.device == META and name in weights and str(lookup(device_map, name)) not in offloaded:
            device = lookup(devices, name)
            if device is not None and as_device(device) != META:
                set_module_tensor_to_device(model, name, device, weights[name])


def _lies_together(model: nn.Module, names: Iterable[str]) -> bool:
    """Return whether no name of a tied group is offloaded, or on another device than the rest."""
    devices = {model.get_parameter(name).device for name in names}
    return len(devices) == 1 and META not in devices


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
    """Make `.to` and its kin speak up on a model whose modules were dispatched."""
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
    warnings.warn(
        f"`.{method}()` was called on a model that is dispatched over devices: its hooks still send inputs to the "
        "devices of the device map.",
        stacklevel=2,
    )
    return getattr(type(model), method)(model, *args, **kwargs)
