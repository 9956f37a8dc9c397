"""Weights in 8 and 4 bits: what is stored beside them, and how they are placed or written to the disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.devices import registry
from accelerate.offload.places import META
from accelerate.offload.store import offload_weight
from accelerate.offload.tensors import owner_of, set_module_tensor_to_device

_SCALES = "SCB"
SCALES = (_SCALES, "weight_format")
"""The last parts of names of what is stored beside a quantised weight, and read with it: its scales and its layout."""
_WEIGHT = "weight"


def scales_name(weight_name: str) -> str:
    """Return the name of the scales that belong to a weight; the empty name for other tensors, which have none."""
    return f"{weight_name.removesuffix(_WEIGHT)}{_SCALES}" if weight_name.endswith(_WEIGHT) else ""


def statistics_in(names: Iterable[str]) -> dict[str, list[str]]:
    """Return, for each weight in 4 bits of a file, the names of what is stored beside it: `"layer.weight.absmax"`."""
    present = set(names)
    found: dict[str, list[str]] = {}
    for name in present:
        layer, dot, _ = name.rpartition(f".{_WEIGHT}.")
        weight = f"{layer}.{_WEIGHT}" if dot else _WEIGHT
        if weight in present and name.startswith(f"{weight}."):
            found.setdefault(weight, []).append(name)
    return found


def is_4bit(parameter: torch.Tensor | None) -> bool:
    """Return whether a parameter is of the class of bitsandbytes that packs weights in 4 bits."""
    return type(parameter).__name__ == "Params4bit"


def place_packed(
    model: nn.Module,
    weight_name: str,
    value: torch.Tensor,
    statistics: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Give a layer that computes in 4 bits a weight that is packed already.

    Args:
        statistics: What was stored beside the weight, by name.

    Raises:
        ConfigurationError: If there is nothing beside it.
    """
    owner, key = owner_of(model, weight_name)
    if not statistics:
        raise ConfigurationError(
            f"The checkpoint holds {weight_name!r} as {str(value.dtype)!r} and nothing beside it in the same file, so it "
            "cannot be unpacked to 4 bits. Load the checkpoint that is not quantised, or save the quantised model to one "
            "file (`max_shard_size=`)."
        )
    made: Any = type(owner._parameters[key])
    owner._parameters[key] = made.from_prequantized(
        data=value, quantized_stats=dict(statistics), requires_grad=False, device=device, module=owner
    )


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
