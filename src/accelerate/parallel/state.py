"""Bring the weights of a model that is spread over ranks together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def gather_whole(weights: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return weights with every split tensor whole, on the CPU; all ranks take part, and those that keep none get none.

    One tensor is brought together at a time, so that no rank holds more than one beyond what it keeps.
    """
    found: dict[str, Any] = {}
    same: dict[int, Any] = {}
    for name, value in weights.items():
        key = id(value)
        if key not in same:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            same[key] = whole.detach().cpu() if keep and isinstance(whole, torch.Tensor) else (whole if keep else None)
            del whole
        if keep:
            found[name] = same[key]
    return found


def gather_stages(weights: Mapping[str, Any], group: dist.ProcessGroup, *, keep: bool) -> dict[str, Any]:
    """Return the weights of all stages of a pipeline to the rank that keeps them, which is the first of them."""
    own = {name: value.detach().cpu() for name, value in weights.items()}
    first = dist.get_process_group_ranks(group)[0]
    received: list[Any] | None = [None] * group.size() if dist.get_rank() == first else None
    dist.gather_object(own, received, dst=first, group=group)
    if not keep or received is None:
        return {}
    return {name: value for part in received for name, value in part.items()}
