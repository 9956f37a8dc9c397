"""Context parallelism: every rank of a group works on its part of each sequence, and attends to all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.devices import registry
from accelerate.runtime.torch_private import mode_in_backward, set_context_rotation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_attention = torch.nn.functional.scaled_dot_product_attention
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)


@contextmanager
def split_sequences(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: Iterable[torch.Tensor] = (),
    exchange: str = "allgather",
) -> Iterator[None]:
    """Cut tensors to this rank's part of the sequence, and let attention inside see the keys and values of all ranks.

    Args:
        mesh: The axis of context parallelism alone.
        buffers: What has a dimension for the sequence: tokens, labels, positions. Cut in place, and restored after.
        buffer_seq_dims: That dimension in each of them.
        no_restore_buffers: Buffers that may stay cut afterwards.
        exchange: How torch's own attention passes keys and values around, where the hardware has it: "allgather",
            "alltoall".

    Raises:
        ConfigurationError: If a buffer has no such dimension, or a sequence cannot be cut into equal parts.
    """
    kept = {id(buffer) for buffer in no_restore_buffers}
    _check(buffers, buffer_seq_dims, kept, mesh.size())
    if not registry.get(mesh.device_type).splits_attention:
        with _cut(mesh, buffers, buffer_seq_dims, kept), GatheredAttention(mesh.get_group()):
            yield
        return
    # torch's own context (2.9 to 2.13), which reorders sequences, and is right with the attention kernels of CUDA alone.
    from torch.distributed.tensor.experimental import context_parallel

    set_context_rotation(exchange)
    left = {buffer for buffer in buffers if id(buffer) in kept}
    with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=list(buffer_seq_dims), no_restore_buffers=left):
        yield


def _check(buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[int], size: int) -> None:
    if len(buffers) != len(dims):
        raise ConfigurationError(
            f"buffer_seq_dims={list(dims)!r} has {len(dims)} entries for {len(buffers)} buffers. Give the dimension of the "
            "sequence for each buffer."
        )
    if not kept <= {id(buffer) for buffer in buffers}:
        raise ConfigurationError(
            f"no_restore_buffers has {len(kept)} tensors, some of which are not among the {len(buffers)} buffers. Name "
            "only tensors that are in `buffers` too."
        )
    for place, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ConfigurationError(
                f"Buffer {place} of shape {tuple(buffer.shape)!r} has {buffer.ndim} dimensions, but buffer_seq_dims says "
                f"that the sequence is along dimension {dim!r}. Write one that it has."
            )
        length = buffer.shape[dim]
        if length % size:
            raise ConfigurationError(
                f"Buffer {place} of shape {tuple(buffer.shape)!r} has {length} positions along dimension {dim}, which "
                f"cp_size={size} ranks cannot share equally. Pad the sequences to a multiple of {size}."
            )


@contextmanager
def _cut(mesh: DeviceMesh, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept: set[int]) -> Iterator[None]:
    rank, size = mesh.get_local_rank(), mesh.size()
    whole = [(buffer, buffer.detach().clone()) for buffer in buffers if id(buffer) not in kept]
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            _overwrite(buffer, buffer.chunk(size, dim)[rank].clone())
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in whole:
                _overwrite(buffer, value)


def _overwrite(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor another shape and content in place, in memory of its own: a view leaves its base alone."""
    buffer.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())


class _Gather(torch.autograd.Function):
    """Bring the parts of a tensor together along a dimension; its gradient goes back to the parts, summed over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].contiguous(), None, None


def _gather(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    whole: torch.Tensor = _Gather.apply(tensor, dim, group)  # type: ignore[no-untyped-call]
    return whole


class GatheredAttention(TorchFunctionMode):
    """Replace `scaled_dot_product_attention` by one over the keys and values of all ranks.

    Args:
        group: The ranks that hold the parts of each sequence, in their order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Take calls of attention; pass all others on."""
        if func is _attention:
            return self._attend(*args, **(kwargs or {}))
        if func in _BACKWARD:
            # torch takes a mode off while it is asked, but checkpointed layers attend again inside of this pass.
            with mode_in_backward(self):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        key, value = (_gather(part, -2, self.group) for part in (key, value))
        rows, columns = query.shape[-2], key.shape[-2]
        if attn_mask is not None:
            attn_mask = self._whole_mask(attn_mask, rows, columns)
        if is_causal:
            # Each of this rank's positions may look at itself and at those before it in the whole sequence.
            own = torch.arange(rows, device=query.device) + self.group.rank() * rows
            attn_mask = own[:, None] >= torch.arange(columns, device=query.device)
        return _attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **options)

    def _whole_mask(self, mask: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        if mask.shape[-1] == columns:
            return mask
        if mask.shape[-2] == 1:  # a mask over keys alone was cut with them
            whole = _gather(mask.to(torch.uint8) if mask.dtype == torch.bool else mask, -1, self.group)
            return whole.to(mask.dtype)
        raise UsageError(
            f"Attention inside maybe_context_parallel got a mask of shape {tuple(mask.shape)!r}, but {rows} of {columns} "
            "positions are here: a mask made from a part of the sequence says nothing of the rest. Pass is_causal=True "
            f"and no mask, or a mask whose last dimension is {columns}."
        )
