"""Questions about a model's structure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, overload

import torch

from accelerate._base.imports import is_peft_available, require
from accelerate.parallel.unwrap import extract_model_from_parallel

Named = tuple[str, torch.nn.Module]


def is_peft_model(model: torch.nn.Module) -> bool:
    """Say whether a model, below what wraps it, has adapters of peft."""
    if not is_peft_available():
        return False
    peft = require("peft", why="Recognising a model with adapters")
    return isinstance(extract_model_from_parallel(model), peft.PeftModel)


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Say whether a parameter of the model is spread over processes as a DTensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Return over how many processes the model's layers are split, or None for a model that says nothing of it."""
    direct = getattr(model, "tp_size", None)
    if direct is not None:
        return int(direct)
    described = getattr(getattr(model, "config", None), "distributed_config", None)
    size = described.get("tp_size") if isinstance(described, dict) else getattr(described, "tp_size", None)
    return None if size is None else int(size)


@overload
def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: Literal[False] = ...
) -> list[torch.nn.Module]: ...
@overload
def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: Literal[True]) -> list[Named]: ...
def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: bool = False
) -> list[torch.nn.Module] | list[Named]:
    """Return all modules of a model, children before their parents and the model itself last.

    Args:
        return_fqns: Return pairs of dotted name and module; the model's own name is empty.
    """
    named = list(_bottom_up(model, ""))
    return named if return_fqns else [module for _, module in named]


def _bottom_up(module: torch.nn.Module, name: str) -> Iterator[Named]:
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module
