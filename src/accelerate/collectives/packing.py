"""Carry several small tensors in one exchange: the price of a small collective is its latency, not its size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accelerate.collectives.base import communicator

# Every dtype can be viewed at a multiple of its largest element, complex128.
_ALIGNMENT = 16
# Above this a copy into one buffer costs more than the latency it saves.
_LARGEST_PACKED = 1 << 20

Spec = tuple[tuple[int, ...], torch.dtype]


def spec_of(tensor: Tensor) -> Spec:
    """Return shape and dtype, as plain values."""
    return tuple(tensor.shape), tensor.dtype


def packed_size(specs: Sequence[Spec]) -> int:
    """Return how many bytes tensors of these shapes and dtypes fill."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in specs)


def is_packable(tensors: Sequence[Tensor]) -> bool:
    """Return whether one buffer is the better way for these tensors; equal on ranks with equal shapes and dtypes."""
    dense = all(type(tensor) in (Tensor, torch.nn.Parameter) and _is_dense(tensor) for tensor in tensors)
    return dense and packed_size([spec_of(tensor) for tensor in tensors]) <= _LARGEST_PACKED


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of the tensors as one vector on the device of the first."""
    size = packed_size([spec_of(tensor) for tensor in tensors])
    buffer = torch.zeros(size, dtype=torch.uint8, device=tensors[0].device if tensors else None)
    offset = 0
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
        buffer[offset : offset + flat.numel()] = flat
        offset += _aligned(flat.numel())
    return buffer


def unpack(buffer: Tensor, specs: Sequence[Spec]) -> list[Tensor]:
    """Return the tensors that were packed, as views of the buffer."""
    tensors, offset = [], 0
    for shape, dtype in specs:
        size = math.prod(shape) * dtype.itemsize
        tensors.append(buffer[offset : offset + size].view(dtype).view(shape))
        offset += _aligned(size)
    return tensors


def gather_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Gather tensors that have equal shapes on all ranks, several small ones in one exchange."""
    group = communicator()
    if len(tensors) < 2 or not is_packable(tensors):
        return [group.gather(tensor) for tensor in tensors]
    own = pack(tensors)
    specs = [spec_of(tensor) for tensor in tensors]
    rows = group.gather(own).view(group.world_size, -1).unbind()
    columns = zip(*[unpack(row, specs) for row in rows], strict=True)
    return [joined_rows(column).to(tensor.device) for column, tensor in zip(columns, tensors, strict=True)]


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors on the first dimension; 0-d tensors count as one row."""
    return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_dense(tensor: Tensor) -> bool:
    known = tensor.layout == torch.strided and tensor.device.type != "meta"
    return known and not tensor.is_nested and not tensor.is_quantized
