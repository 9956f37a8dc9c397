"""What strategies share whose ranks hold parts of tensors: gather, clip and scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from accelerate._base.helpers import log_once
from accelerate.offload.tensors import find_tied_parameters
from accelerate.parallel.mesh import submesh
from accelerate.parallel.unwrap import extract_model_from_parallel, plain_name

Groups = tuple[dist.ProcessGroup, ...]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: all of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor; every rank that holds a part of it calls this."""
    if not isinstance(tensor, DTensor):
        return tensor
    # Parts that wait in host memory travel from the device: its group need not reach the CPU.
    kind = tensor.device_mesh.device_type
    held = tensor if tensor.device.type == kind else cast("DTensor", tensor.to(kind))
    return held.full_tensor()


def split_like(tensor: torch.Tensor, pattern: torch.Tensor | None, axes: Sequence[str] | None = None) -> torch.Tensor:
    """Return this rank's part of a full tensor that all ranks have, split as another tensor is.

    Args:
        axes: The axes of the pattern's mesh along which it is split; by default all.
    """
    if not isinstance(pattern, DTensor):
        return tensor
    mesh, placements = pattern.device_mesh, pattern.placements
    if axes is not None:
        names = mesh.mesh_dim_names or ()
        kept = [index for index, name in enumerate(names) if name in axes]
        if not kept:
            return tensor
        mesh = submesh(mesh, *(names[index] for index in kept))
        placements = tuple(placements[index] for index in kept)
    return distribute_tensor(tensor.to(pattern.device), mesh, placements, src_data_rank=None)


def split_groups(tensor: torch.Tensor) -> Groups:
    """Return the groups of ranks over which a tensor is split."""
    if not isinstance(tensor, DTensor):
        return ()
    placements = enumerate(tensor.placements)
    # A tensor that is split twice along one dimension has a placement that is no plain shard.
    return tuple(tensor.device_mesh.get_group(axis) for axis, placement in placements if not placement.is_replicate())


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the part of a parameter's gradient that this rank holds, split as the parameter is.

    DTensor operations choose the placement of a gradient: that of a row-wise split embedding is replicated, that of a
    norm under sequence parallelism consists of partial sums. The ranks that share the parameter call this together.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        # Kept, so that the optimizer does not exchange the gradient again.
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def ranks_in(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a group over which a tensor is laid out; one rank for a tensor that each of them holds."""
    if not isinstance(tensor, DTensor):
        return [dist.get_rank()]
    return sorted({*tensor.device_mesh.mesh.flatten().tolist()} & {*dist.get_process_group_ranks(group)})


def gather_full(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Return a nested state with every tensor full and on the CPU; all ranks take part, and those that keep none get none.

    One tensor is gathered at a time, so that no rank holds more than one beyond what it keeps. What is one tensor under
    several names stays one.
    """
    gathered: dict[int, Any] = {}

    def gather(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: gather(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [gather(entry) for entry in value]
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in gathered:
            tensor = _full_at_rank0(value) if hasattr(value, "local_shards") else full(value)
            gathered[id(value)] = tensor.detach().cpu() if keep else None
        return gathered[id(value)]

    found: dict[str, Any] = gather(state)
    return found if keep else {}


def _full_at_rank0(tensor: Any) -> torch.Tensor:
    """Return all of torch's old ShardedTensor, which FSDP 1 makes without a mesh, on rank 0; anything on the others."""
    if dist.get_rank() != 0:
        tensor.gather(0)
        return torch.empty(0)
    found = torch.empty(tensor.size(), dtype=tensor.dtype, device=tensor.local_shards()[0].tensor.device)
    tensor.gather(0, found)
    return found


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name in the user's model of every parameter, by identity; gathered parameters are freed first."""
    from torch.distributed.fsdp import FSDPModule

    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    for unit in inner.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # after a forward pass modules may still hold the full parameters, which no optimizer has
    return {id(parameter): plain_name(name) for name, parameter in inner.named_parameters()}


@dataclass(frozen=True)
class UnshardedParameters:
    """The parameters of a model as the user knows them, below the wrappers of engines.

    Args:
        shapes: Name -> full shape, in the order of the model.
        tied: The names of each parameter that has several.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: list[list[str]]

    _KEPT = "_unsharded_parameters"

    @classmethod
    def of(cls, model: nn.Module) -> UnshardedParameters:
        """Return what was kept of a model before version 1 of FSDP flattened it, else look at it; no rank waits."""
        kept: UnshardedParameters | None = model.__dict__.get(cls._KEPT)
        if kept is not None:
            return kept
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        named = inner.named_parameters(remove_duplicate=False)
        shapes = {plain_name(path): tuple(parameter.shape) for path, parameter in named}
        return cls(shapes, [[plain_name(path) for path in group] for group in find_tied_parameters(inner)])

    def keep_on(self, model: nn.Module) -> None:
        """Keep this with a model that is flattened by now."""
        model.__dict__[self._KEPT] = self


def update_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Switch off kernels over lists of parameters for groups that span several meshes: such a list has one mesh."""
    for group in optimizer.param_groups:
        meshes = {entry.device_mesh if isinstance(entry, DTensor) else None for entry in group["params"]}
        if len(meshes) < 2:
            continue
        for option in ("foreach", "fused"):
            if group.get(option):
                name = type(optimizer).__name__
                log_once(
                    __name__,
                    f"{name}({option}=True) cannot update parameters of different meshes together and runs as "
                    f"{option}=False.",
                )
            if option in group:
                group[option] = False


def scale_gradients(parameters: Iterable[torch.Tensor], factor: torch.Tensor | float) -> None:
    """Multiply this rank's part of the gradients that are there by `factor`."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_grad_value(parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
    """Limit each element of this rank's part of the gradients."""
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        gradient = gradient_of(parameter)
        if gradient is not None:
            gradient.clamp_(min=-clip_value, max=clip_value)


@dataclass
class _SplitAlike:
    """The gradients that are split over the same ranks."""

    dtype: torch.dtype = torch.float32
    parts: list[torch.Tensor] = field(default_factory=list)


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    *,
    groups_of: Callable[[torch.Tensor], Groups] = split_groups,
    stages: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale gradients down so that the norm of the whole model is at most `max_norm`, and return the norm they had.

    A rank that holds nothing of a gradient still takes part in the sum.

    Args:
        parameters: Parameters of this rank, split over ranks in different ways or not at all.
        device: Where the groups' tensors lie.
        groups_of: Returns the groups of ranks over which a parameter and its gradient are split.
        stages: The ranks that hold other layers of the same model.
    """
    families: dict[Groups, _SplitAlike] = {}
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        family = families.setdefault(groups_of(parameter), _SplitAlike())
        family.dtype = torch.promote_types(family.dtype, parameter.dtype)
        gradient = gradient_of(parameter)
        if gradient is not None:
            family.parts.append(gradient)
    is_largest = math.isinf(norm_type)
    operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
    powers = []
    for groups, family in families.items():
        power = torch.zeros((), dtype=family.dtype, device=device)
        filled = [part for part in family.parts if part.numel()]
        if filled:
            norms = torch.stack([norm.to(device, family.dtype) for norm in torch._foreach_norm(filled, norm_type)])
            power = torch.linalg.vector_norm(norms, norm_type)
            power = power if is_largest else power**norm_type
        for group in groups:
            dist.all_reduce(power, op=operation, group=group)
        powers.append(power)
    joined = torch.stack([power.to(powers[0].dtype) for power in powers]) if powers else torch.zeros(1, device=device)
    total = joined.max() if is_largest else joined.sum()
    if stages is not None:
        dist.all_reduce(total, op=operation, group=stages)
    total = total if is_largest else total ** (1.0 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for family in families.values():
        for part in family.parts:
            by_device.setdefault(part.device, []).append(part)
    for place, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(place))
    return total
