"""Where a model is cut into stages of about the same size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.offload.places import Place
from accelerate.offload.sizes import (
    as_class_names,
    compute_module_sizes,
    convert_file_size_to_int,
    is_splittable,
    parts_of,
)

Piece = tuple[str, int]
"""A module or tensor that is not cut, and its bytes."""


def even_device_map(
    model: nn.Module, num_stages: int, no_split_module_classes: str | Iterable[str] | None = None
) -> dict[str, Place]:
    """Return a stage for every module, in their order, such that the largest stage is as small as can be."""
    pieces = _pieces(model, no_split_module_classes)
    low, high = max((size for _, size in pieces), default=0), sum(size for _, size in pieces)
    while low < high:
        limit = (low + high) // 2
        if max(_packed(pieces, [limit] * num_stages).values()) < num_stages:
            high = limit
        else:
            low = limit + 1
    return dict(_packed(pieces, [high] * num_stages))


def limited_device_map(
    model: nn.Module, limits: Mapping[int, int | str], no_split_module_classes: str | Iterable[str] | None = None
) -> dict[str, Place]:
    """Return a stage for every module, in their order, within the bytes that each stage may take.

    Raises:
        ConfigurationError: If the model does not fit.
    """
    room = [convert_file_size_to_int(limits[stage]) for stage in sorted(limits)]
    packed = _packed(_pieces(model, no_split_module_classes), room)
    outside = [name for name, stage in packed.items() if stage >= len(room)]
    if outside:
        raise ConfigurationError(
            f"max_memory={dict(limits)!r} has no room for {outside!r} of {type(model).__name__}, in the order of the "
            "model. Give more memory, more processes, or fewer classes in no_split_module_classes."
        )
    return dict(packed)


def _pieces(model: nn.Module, no_split_module_classes: str | Iterable[str] | None) -> list[Piece]:
    """Return the pieces of a model in their order; those that Transformers names for its models stay whole."""
    named = no_split_module_classes or getattr(model, "_no_split_modules", None)
    no_split, sizes = as_class_names(named), compute_module_sizes(model)
    found: list[Piece] = []

    def visit(name: str, part: nn.Module | torch.Tensor) -> None:
        if is_splittable(part, no_split):
            for key, inner in parts_of(part, name):
                visit(key, inner)
        else:
            found.append((name, sizes.get(name, 0)))

    for name, part in parts_of(model):
        visit(name, part)
    return found


def _packed(pieces: Sequence[Piece], limits: Sequence[int]) -> dict[str, int]:
    """Return the stage of each piece, filling one stage after the other; one past the last if it fits nowhere."""
    packed: dict[str, int] = {}
    stage, used = 0, 0
    for name, size in pieces:
        while stage < len(limits) and used + size > limits[stage]:
            stage, used = stage + 1, 0
        packed[name] = stage
        used += size
    return packed


def split_points(model: nn.Module, device_map: Mapping[str, Place], num_stages: int) -> list[str]:
    """Return the module that each stage but the first starts with.

    Raises:
        ConfigurationError: If the map does not fill every stage.
    """
    modules = {name for name, _ in model.named_modules()}
    firsts: dict[Place, str] = {}
    for name, stage in device_map.items():
        if name in modules:  # a tensor by itself has no forward pass to cut before
            firsts.setdefault(stage, name)
    points = [firsts[stage] for stage in range(1, num_stages) if stage in firsts]
    if len(points) < num_stages - 1:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be cut into {num_stages} stages: with the blocks that stay whole it gives "
            f"{len(points) + 1}. Start fewer processes, or name fewer classes in no_split_module_classes."
        )
    return points


def check_points(model: nn.Module, points: Iterable[str], num_stages: int) -> list[str]:
    """Return the names of modules that a user cuts a model at.

    Raises:
        ConfigurationError: If one names no module, or their number does not fit the number of processes.
    """
    names = list(points)
    known = {name for name, _ in model.named_modules()}
    unknown = [name for name in names if name not in known or not name]
    if unknown:
        raise ConfigurationError(
            f"split_points={names!r} names {unknown!r}, which {type(model).__name__} has no modules for. "
            "Write names that `model.named_modules()` gives."
        )
    if len(names) != num_stages - 1:
        raise ConfigurationError(
            f"split_points={names!r} cuts the model into {len(names) + 1} stages, and there are {num_stages} "
            f"processes, which run one each. Give {num_stages - 1} names, or start {len(names) + 1} processes."
        )
    return names
