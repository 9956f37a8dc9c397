"""Memory: the bytes that tensors and modules take, and the bytes that each device has for them."""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from accelerate._base.enums import CustomDtype
from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import first_line, shown
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.offload.places import DISK, HOST
from accelerate.offload.tensors import ModuleTree, TreeNode, as_class_names, is_splittable, parts_of, resolve_dtype

logger = logging.getLogger("accelerate.utils.modeling")  # programs filter this name

Dtype: TypeAlias = str | torch.dtype | CustomDtype

_UNITS = {"TIB": 2**40, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_CUSTOM_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
SINGLE_DEVICE_SHARE = 0.9
"""Of the free memory of a single accelerator, what weights may take: the rest is for activations."""
HEADROOM = 1.25
"""What a balanced device may take over its even share, in units of the largest block."""


def convert_file_size_to_int(size: float | str) -> int:
    """Return a size in bytes: `"5GB"` is decimal, `"5GiB"` binary, a small final `b` means bits.

    Raises:
        ConfigurationError: If the text is not a number with one of these units.
    """
    if not isinstance(size, str):
        if not math.isfinite(size):
            raise _unreadable_size(size)
        return int(size)  # a share of the memory, such as 0.9 of it, is a float
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", size, flags=re.IGNORECASE)
    count = float(match[1]) * _UNITS[match[2].upper()] if match is not None else math.inf
    if match is None or not 0 <= count < math.inf:
        raise _unreadable_size(size)
    return int(count) // 8 if match[2].endswith("b") else int(count)


def _unreadable_size(size: float | str) -> ConfigurationError:
    return ConfigurationError(
        f"The size {shown(size)} cannot be read: it is not a positive number with a unit. "
        'Write bytes as an integer, or a text like "5GB", "800MB" or "1.5GiB".'
    )


def dtype_byte_size(dtype: Dtype) -> float:
    """Return the bytes that one element takes when packed, so a boolean is an eighth of a byte."""
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    dtype = resolve_dtype(dtype)
    return 1 / 8 if dtype == torch.bool else dtype.itemsize


def tensor_size(
    name: str, tensor: torch.Tensor, dtype: Dtype | None, special_dtypes: Mapping[str, Dtype] | None
) -> int:
    """Return the bytes that a tensor will take once loaded as `dtype`, or as its entry in `special_dtypes`."""
    is_special = special_dtypes is not None and name in special_dtypes
    wanted = special_dtypes[name] if special_dtypes is not None and is_special else dtype
    if wanted is None or not (is_special or tensor.is_floating_point() or tensor.is_complex()):
        return tensor.nbytes
    # In memory a boolean is a whole byte.
    per_element = dtype_byte_size(wanted) if isinstance(wanted, CustomDtype) else resolve_dtype(wanted).itemsize
    return int(tensor.numel() * (per_element if is_special else min(per_element, tensor.dtype.itemsize)))


def compute_module_sizes(
    model: nn.Module | ModuleTree,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every tensor and of every module by its dotted name; `""` is the whole model.

    Args:
        model: A model, or its tree if that was walked already.
        dtype: The dtype that the model will be loaded in; it makes floating-point tensors smaller, never larger.
        special_dtypes: The dtype of single tensors by name, before `dtype`.
        buffers_only: Leave the parameters out.
    """
    tree = model if isinstance(model, ModuleTree) else ModuleTree(model)
    sizes: defaultdict[str, int] = defaultdict(int)
    totals, holders = [0] * len(tree.modules), bytearray(len(tree.modules))
    as_stored = dtype is None and not special_dtypes
    seen: set[int] = set()
    for number, (prefix, module) in enumerate(zip(tree.prefixes, tree.modules, strict=True)):
        sizes[prefix[:-1]] = 0  # a module stands before what is in it
        for table in (module._buffers,) if buffers_only else (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or id(tensor) in seen:
                    continue  # a shared tensor counts under its first name
                seen.add(id(tensor))
                key = prefix + name
                size = tensor.nbytes if as_stored else tensor_size(key, tensor, dtype, special_dtypes)
                sizes[key] = size
                totals[number] += size
                holders[number] = 1
    for number in range(len(tree.modules) - 1, 0, -1):
        totals[tree.parents[number]] += totals[number]
        holders[tree.parents[number]] |= holders[number]
    for number, prefix in enumerate(tree.prefixes):
        if holders[number]:
            sizes[prefix[:-1]] = totals[number]
        else:
            del sizes[prefix[:-1]]
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Dtype | None = None, special_dtypes: Mapping[str, Dtype] | None = None
) -> int:
    """Return the bytes of all buffers of a model."""
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[TreeNode], module_sizes: Mapping[str, int], no_split_module_classes: str | Iterable[str] | None
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer that must stay whole, and the names of all layers of that size."""
    no_split = as_class_names(no_split_module_classes)
    largest, names = 0, list[str]()
    pending = list(reversed(modules))
    while pending:
        name, module = pending.pop()
        if not isinstance(module, torch.Tensor) and is_splittable(module, no_split):
            pending += [(f"{name}.{key}", child) for key, child in reversed(list(module.named_children()))]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, []
        if size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of the model, and of its largest layer with the names of the layers of that size."""
    sizes = compute_module_sizes(model)
    no_split = getattr(model, "_no_split_modules", None)
    return sizes[""], get_max_layer_size(parts_of(model, buffers=False), sizes, no_split)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Return the names under which no other name lies."""
    parents = {name.rpartition(".")[0] for name in module_sizes if "." in name} | {""}
    return [name for name in module_sizes if name not in parents]


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> dict[int | str, int]:
    """Return the bytes that each device may take, ordered as a plan fills them: accelerators, CPU, disk.

    Args:
        max_memory: Limits in bytes or as text like `"10GB"`, which becomes bytes in place: programs compare the limits
            that they gave after the call. Without it, the memory that is free now.

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
    limits = {key: convert_file_size_to_int(max_memory[key]) for key in order}
    if isinstance(max_memory, MutableMapping):
        max_memory.update((key, limits[key]) for key, given in max_memory.items() if isinstance(given, str))
    return limits


def _indices(backend: DeviceBackend) -> list[int]:
    """Return the indices of the accelerators; none for a single device that torch gives no index."""
    if backend.type == HOST or backend.device(0).index is None:
        return []
    return list(range(backend.device_count()))


def _free_memory(backend: DeviceBackend) -> dict[int | str, int]:
    import psutil

    host: int = psutil.virtual_memory().available
    if backend.type == HOST:
        return {HOST: host}
    indices = _indices(backend)
    if not indices:  # one device without an index works in the memory of the host
        return {backend.type: host}
    free: dict[int | str, int] = {index: _free_on(backend, index) for index in indices}
    properties = getattr(backend.module, "get_device_properties", lambda index: None)
    if not all(getattr(properties(index), "is_integrated", False) for index in indices):
        free[HOST] = host
    return free


def _free_on(backend: DeviceBackend, index: int) -> int:
    query = getattr(backend.module, "mem_get_info", None) or torch.accelerator.get_memory_info
    try:
        return int(query(index)[0])
    except RuntimeError as error:  # a device that torch learned from outside may not say
        raise ConfigurationError(
            f"{backend.type}:{index} does not say how much memory is free on it ({first_line(error)}). Give the limits "
            f'yourself: max_memory={{{index}: "10GB", "cpu": "20GB"}}.'
        ) from error


def free_memory_of(device: torch.device, host: int) -> int:
    """Return the bytes that are free on a device; `host` for one without memory of its own."""
    backend = registry.get(device)
    if backend.type == HOST or device.index is None or not backend.is_available():
        return host
    return _free_on(backend, device.index)


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int | str]:
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
    no_split = as_class_names(no_split_module_classes)
    blocks = [sizes.get(name, 0) for name, module in model.named_modules() if type(module).__name__ in no_split]
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    layers = get_module_leaves(modules)  # modules that hold tensors and no other module
    mean_layer = int(sum(modules[name] for name in layers) / max(len(layers), 1))
    share += int(HEADROOM * max(mean_layer, *blocks, 0))
    # The last device keeps its whole limit, so that rounding never sends a layer to the CPU.
    for key in usable[:-1]:
        limits[key] = min(limits[key], share)
    if low_zero:
        rest = sum(limits[key] for key in usable[1:])
        limits[usable[0]] = min(limits[usable[0]], max(0, sizes[""] - rest))
    return dict(limits)
