"""Weights in 8 bits: their scales, and how they are quantised on the way to the disk."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from ..devices import registry
from .places import META
from .store import offload_weight
from .tensors import owner_of, set_module_tensor_to_device

_SCALES = "SCB"
SCALES = (_SCALES, "weight_format")
"""The last parts of names of what is stored beside a quantised weight, and read with it: its scales and its layout."""
_WEIGHT = "weight"


def scales_name(weight_name: str) -> str:
    """Return the name of the scales that belong to a weight; the empty name for other tensors, which have none."""
    return f"{weight_name.removesuffix(_WEIGHT)}{_SCALES}" if weight_name.endswith(_WEIGHT) else ""


def offload_quantised(
    model: nn.Module,
    weight_name: str,
    value: torch.Tensor,
    dtype: torch.dtype | None,
    offload_folder: str | os.PathLike[str],
    index: MutableMapping[str, Any],
) -> None:
    """Write a weight to the disk in 8 bits if its layer computes in 8 bits, and as it is otherwise.

    The parameter class of the layer quantises when it moves to a device, so the weight visits one.
    """
    owner, key = owner_of(model, weight_name)
    set_module_tensor_to_device(model, weight_name, registry.default().value.device(0), value=value, dtype=dtype)
    placed = owner._parameters[key] if key in owner._parameters else owner._buffers[key]
    if placed is None:
        return
    scales = getattr(placed, _SCALES, None)
    offload_weight(placed.detach(), weight_name, offload_folder, index)
    if isinstance(scales, torch.Tensor):
        offload_weight(scales, scales_name(weight_name), offload_folder, index)
    set_module_tensor_to_device(model, weight_name, META, dtype=placed.dtype)
