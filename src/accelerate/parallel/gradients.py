"""Gradients of a model that is spread over ranks: averaged, scaled and clipped as those of one model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from accelerate.runtime.torch_private import after_backward

# Large enough to use the network well, small enough to be no second copy of a big model's gradients.
BUCKET_BYTES = 25 * 2**20


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: all of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor; every rank that holds a part of it calls this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def split_like(tensor: torch.Tensor, pattern: torch.Tensor | None, axes: Sequence[str] | None = None) -> torch.Tensor:
    """Return this rank's part of a whole tensor that all ranks have, split as another tensor is.

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
        mesh, placements = mesh[tuple(names[index] for index in kept)], tuple(placements[index] for index in kept)
    return distribute_tensor(tensor.to(pattern.device), mesh, placements, src_data_rank=None)


def by_layout(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Sort tensors by how they are spread, because torch's functions on lists take one kind at a time."""
    kinds: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.device_mesh if isinstance(tensor, DTensor) else None].append(tensor)
    return list(kinds.values())


def scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply the gradients that are there by `factor`."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    stages: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale gradients down so that the norm of the whole model is at most `max_norm`, and return the norm they had.

    Args:
        parameters: Parameters of this rank, split over ranks in different ways or not at all.
        stages: The ranks that hold other layers of the same model.
    """
    entries = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [entry.grad for entry in entries if entry.grad is not None]
    total = _total_norm(gradients, norm_type)
    if stages is not None:
        total = _over_stages(total, norm_type, stages)
    if gradients:
        torch._foreach_mul_([local(entry) for entry in gradients], torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _total_norm(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    norms = []
    for alike in by_layout(gradients):
        norm = torch.nn.utils.get_total_norm(alike, norm_type)
        # Each rank knows the norm of its own part until it is asked for as a whole.
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


def _over_stages(norm: torch.Tensor, norm_type: float, stages: dist.ProcessGroup) -> torch.Tensor:
    if norm_type == float("inf"):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=stages)
        return norm
    powered = norm**norm_type
    dist.all_reduce(powered, group=stages)
    return powered ** (1.0 / norm_type)


def share_from_first(model: torch.nn.Module, group: dist.ProcessGroup, *, split: bool) -> None:
    """Give all ranks of a group the parameters and buffers of its first.

    Args:
        split: Take in what is split over other ranks; without it, only what every rank holds whole.
    """
    source = dist.get_process_group_ranks(group)[0]
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if split or not isinstance(tensor, DTensor):
                own = local(tensor.detach()).contiguous()
                dist.broadcast(own, source, group=group)
                local(tensor.detach()).copy_(own)


class GradientMean:
    """Average the gradients of a model over a group of ranks, at the end of each backward pass.

    Args:
        model: The model, as it is trained.
        group: The ranks that hold the same part of it.
    """

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        self.group = group
        self.is_held = False
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._is_queued = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep gradients to this rank; the first pass after this sends their sum."""
        before, self.is_held = self.is_held, True
        try:
            yield
        finally:
            self.is_held = before

    def _note(self, parameter: torch.Tensor) -> None:
        if not self.is_held and not self._is_queued:
            self._is_queued = True
            after_backward(self._exchange)

    def _exchange(self) -> None:
        self._is_queued = False
        gradients = [local(entry.grad) for entry in self._parameters if entry.grad is not None]
        with torch.no_grad():
            for bucket in _buckets(gradients):
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                dist.all_reduce(flat, group=self.group)
                flat /= self.group.size()
                parts = flat.split([gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts, strict=True):
                    gradient.copy_(part.view_as(gradient))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut a list into runs of one dtype and bounded size."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
