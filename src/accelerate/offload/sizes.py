"""How many bytes the tensors and modules of a model take."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from accelerate._base.enums import CustomDtype
from accelerate._base.errors import ConfigurationError
from accelerate.offload.tree import Tree, children_of, has_children, own_buffers, own_parameters

Dtype: TypeAlias = str | torch.dtype | CustomDtype
NamedParts: TypeAlias = Sequence[tuple[str, nn.Module | torch.Tensor]]

_UNITS = {"TIB": 2**40, "GIB": 2**30, "MIB": 2**20, "KIB": 2**10, "TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}
_CUSTOM_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def convert_file_size_to_int(size: float | str) -> int:
    """Return a size in bytes: `"5GB"` is decimal, `"5GiB"` binary, a small final `b` means bits.

    Raises:
        ConfigurationError: If the text is not a number with one of these units.
    """
    if not isinstance(size, str):
        return int(size)  # a share of the memory, such as 0.9 of it, is a float
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", size, flags=re.IGNORECASE)
    if match is None or float(match[1]) < 0:
        raise ConfigurationError(
            f"The size {size!r} cannot be read: it is not a positive number with a unit. "
            'Write bytes as an integer, or a text like "5GB", "800MB" or "1.5GiB".'
        )
    unit = match[2]
    count = int(float(match[1]) * _UNITS[unit.upper()])
    return count // 8 if unit.endswith("b") else count


def dtype_byte_size(dtype: Dtype) -> float:
    """Return the bytes that one element takes when packed, so a boolean is an eighth of a byte."""
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    dtype = resolve_dtype(dtype)
    return 1 / 8 if dtype == torch.bool else dtype.itemsize


def _element_size(dtype: Dtype) -> float:
    """Return the bytes that one element takes in memory, where a boolean is a whole byte."""
    if isinstance(dtype, str):
        dtype = resolve_dtype(dtype)
    return dtype_byte_size(dtype) if isinstance(dtype, CustomDtype) else dtype.itemsize


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a name such as `"float16"` or `"torch.float16"`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(
            f"There is no dtype {dtype!r}: torch has no such name. Write one like 'float16' or 'bfloat16'."
        )
    return found


def tensor_size(
    name: str, tensor: torch.Tensor, dtype: Dtype | None, special_dtypes: Mapping[str, Dtype] | None
) -> int:
    """Return the bytes that a tensor will take once loaded as `dtype`, or as its entry in `special_dtypes`."""
    if special_dtypes is not None and name in special_dtypes:
        per_element = _element_size(special_dtypes[name])
    elif dtype is None or not (tensor.is_floating_point() or tensor.is_complex()):
        per_element = tensor.dtype.itemsize
    else:
        per_element = min(_element_size(dtype), tensor.dtype.itemsize)
    return int(tensor.numel() * per_element)


def compute_module_sizes(
    model: nn.Module,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every tensor and of every module by its dotted name; `""` is the whole model.

    Args:
        dtype: The dtype that the model will be loaded in; it makes floating-point tensors smaller, never larger.
        special_dtypes: The dtype of single tensors by name, before `dtype`.
        buffers_only: Leave the parameters out.
    """
    return sizes_in(Tree(model), dtype, special_dtypes, buffers_only)


def sizes_in(
    tree: Tree,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return what `compute_module_sizes` does, for a model whose tree was walked already."""
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
        totals[tree.above[number]] += totals[number]
        holders[tree.above[number]] |= holders[number]
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


def parts_of(
    module: nn.Module | torch.Tensor, name: str = "", buffers: bool = True
) -> list[tuple[str, nn.Module | torch.Tensor]]:
    """Return what a module is made of: its own parameters, its children, then its own buffers, by full name."""
    if isinstance(module, torch.Tensor):
        return []
    prefix = f"{name}." if name else ""
    found: list[tuple[str, nn.Module | torch.Tensor]] = [*own_parameters(module), *children_of(module)]
    if buffers:
        found += own_buffers(module)
    return [(prefix + key, part) for key, part in found]


def is_splittable(module: nn.Module | torch.Tensor, no_split: Iterable[str]) -> bool:
    """Return whether the parts of a module may go to different devices."""
    if isinstance(module, torch.Tensor) or type(module).__name__ in no_split:
        return False
    return has_children(module)


def as_class_names(no_split_module_classes: str | Iterable[str] | None) -> set[str]:
    """Return the class names that a user gave as one name, as several, or not at all."""
    if no_split_module_classes is None:
        return set()
    return {no_split_module_classes} if isinstance(no_split_module_classes, str) else set(no_split_module_classes)


def get_max_layer_size(
    modules: NamedParts, module_sizes: Mapping[str, int], no_split_module_classes: str | Iterable[str] | None
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
