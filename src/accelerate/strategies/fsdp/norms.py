"""The norm of gradients of which each rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from accelerate.parallel.gradients import local

Groups = tuple[dist.ProcessGroup, ...]


@dataclass
class _Family:
    """The gradients that are spread over the same ranks."""

    dtype: torch.dtype = torch.float32
    parts: list[torch.Tensor] = field(default_factory=list)


def clip_parts(
    parameters: Iterable[tuple[torch.Tensor, Groups]], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Scale gradients down so that their total norm is at most `max_norm`, and return the norm they had.

    Args:
        parameters: Each parameter with the groups of ranks over which its gradient is spread. A rank that holds
            nothing of a gradient still takes part in the sum.
        device: Where the group's tensors lie.
    """
    families: dict[Groups, _Family] = {}
    for parameter, groups in parameters:
        family = families.setdefault(groups, _Family())
        family.dtype = torch.promote_types(family.dtype, parameter.dtype)
        if parameter.grad is not None:
            family.parts.append(local(parameter.grad))
    kind = float(norm_type)
    powers = [_sum_of_powers(family, groups, kind, device) for groups, family in families.items()]
    if not powers:
        return torch.zeros((), device=device)
    joined = torch.stack([power.to(powers[0].dtype) for power in powers])
    total = joined.max() if math.isinf(kind) else joined.sum() ** (1.0 / kind)
    _scale((part for family in families.values() for part in family.parts), (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


def _sum_of_powers(family: _Family, groups: Groups, kind: float, device: torch.device) -> torch.Tensor:
    """Return the sum over all ranks of the powers of all numbers; their largest for the infinite norm."""
    total = torch.zeros((), dtype=family.dtype, device=device)
    filled = [part for part in family.parts if part.numel()]
    if filled:
        norms = torch.stack([norm.to(device, family.dtype) for norm in torch._foreach_norm(filled, kind)])
        total = torch.linalg.vector_norm(norms, kind)
        total = total if math.isinf(kind) else total**kind
    for group in groups:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(kind) else dist.ReduceOp.SUM, group=group)
    return total


def _scale(parts: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    for device, members in by_device.items():
        torch._foreach_mul_(members, factor.to(device))
