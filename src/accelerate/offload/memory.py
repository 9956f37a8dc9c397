"""How much memory each device may take for weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.offload.places import DISK, HOST, MemoryMap
from accelerate.offload.sizes import (
    Dtype,
    as_class_names,
    compute_module_sizes,
    convert_file_size_to_int,
    get_module_leaves,
)

logger = logging.getLogger(__name__)

SINGLE_DEVICE_SHARE = 0.9
"""Of the free memory of a single accelerator, what weights may take: the rest is for activations."""
HEADROOM = 1.25
"""What a balanced device may take over its even share, in units of the largest block."""


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return the bytes that each device may take, ordered as a plan fills them: accelerators, CPU, disk.

    Args:
        max_memory: Limits in bytes or as text like `"10GB"`; without it, the memory that is free now.

    Raises:
        ConfigurationError: If a key is neither an index, a device type, `"cpu"` nor `"disk"`.
    """
    backend = registry.default().value
    if max_memory is None:
        return _free_memory(backend)
    named = [known.type for known in registry.all_backends() if known.type != HOST] + [HOST, DISK]
    unknown = [key for key in max_memory if not isinstance(key, int) and key not in named]
    if unknown:
        raise ConfigurationError(
            f"Memory was given for {unknown!r}, which names no device. Write integers for accelerators, "
            f"or one of {', '.join(repr(name) for name in named)}."
        )
    found = _indices(backend)
    for key in sorted(key for key in max_memory if isinstance(key, int) and key not in found):
        logger.warning("Memory was given for device %r, and the devices found here are %r.", key, found)
    order = sorted(max_memory, key=lambda key: (0, key) if isinstance(key, int) else (1, named.index(key)))
    return {key: convert_file_size_to_int(max_memory[key]) for key in order}


def _indices(backend: DeviceBackend) -> list[int]:
    """Return the indices of the accelerators; none for a single device that torch gives no index."""
    if backend.type == HOST or backend.device(0).index is None:
        return []
    return list(range(backend.device_count()))


def _free_memory(backend: DeviceBackend) -> dict[int | str, int]:
    host: int = require("psutil", why="to see how much memory is free").virtual_memory().available
    if backend.type == HOST:
        return {HOST: host}
    indices = _indices(backend)
    if not indices:  # one device without an index works in the memory of the host
        return {backend.type: host}
    free: dict[int | str, int] = {index: _free_on(backend, index) for index in indices}
    if not all(_shares_host_memory(backend, index) for index in indices):
        free[HOST] = host
    return free


def _free_on(backend: DeviceBackend, index: int) -> int:
    query = getattr(backend.module, "mem_get_info", None) or torch.accelerator.get_memory_info
    return int(query(index)[0])


def free_memory_of(device: torch.device, host: int) -> int:
    """Return the bytes that are free on a device; `host` for one without memory of its own."""
    backend = registry.get(device)
    if backend.type == HOST or device.index is None or not backend.is_available():
        return host
    return _free_on(backend, device.index)


def _shares_host_memory(backend: DeviceBackend, index: int) -> bool:
    properties = getattr(backend.module, "get_device_properties", None)
    return bool(getattr(properties(index), "is_integrated", False)) if properties is not None else False


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> MemoryMap:
    """Return memory limits that make a plan spread the model evenly over the accelerators.

    Args:
        no_split_module_classes: Class names of the blocks that stay whole.
        low_zero: Keep the first accelerator as empty as possible, for work that comes after the model.
    """
    limits = get_max_memory(max_memory)
    usable = [key for key in limits if key not in (HOST, DISK) and limits[key] > 0]
    if not usable:
        return dict(limits)
    if len(usable) == 1:
        if max_memory is None:
            limits[usable[0]] = int(limits[usable[0]] * SINGLE_DEVICE_SHARE)
        return dict(limits)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(usable) - (1 if low_zero else 0))
    share += int(HEADROOM * max(_largest_block(model, sizes, no_split_module_classes), _mean_layer(sizes)))
    # The last device keeps its whole limit, so that rounding never sends a layer to the CPU.
    for key in usable[:-1]:
        limits[key] = min(limits[key], share)
    if low_zero:
        rest = sum(limits[key] for key in usable[1:])
        limits[usable[0]] = min(limits[usable[0]], max(0, sizes[""] - rest))
    return dict(limits)


def _largest_block(model: nn.Module, sizes: Mapping[str, int], no_split: str | Iterable[str] | None) -> int:
    classes = as_class_names(no_split)
    if not classes:
        return 0
    blocks = (name for name, module in model.named_modules() if type(module).__name__ in classes)
    return max((sizes.get(name, 0) for name in blocks), default=0)


def _mean_layer(sizes: Mapping[str, int]) -> int:
    """Return the mean size of the modules that directly hold tensors and no other module."""
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    layers = get_module_leaves(modules)
    return int(sum(modules[name] for name in layers) / max(len(layers), 1))
