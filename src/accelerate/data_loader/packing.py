"""Nested batches as a description and bytes, for sending them between processes."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict
from typing import Any

import torch
from torch import Tensor

from accelerate.collectives.containers import is_namedtuple

_ALIGNMENT = 16
_CONTAINERS = (list, tuple, dict, OrderedDict, UserDict)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Parcel:
    """A batch taken apart: a comparable description, its tensors, and everything else pickled."""

    def __init__(self, batch: Any) -> None:
        self.tensors: list[Tensor] = []
        self._others: list[Any] = []
        self.structure = self._describe(batch)
        self.others = pickle.dumps(self._others) if self._others else b""
        self.tensor_bytes = sum(_aligned(tensor.nbytes) for tensor in self.tensors)

    def _describe(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if kind is Tensor and value.layout is torch.strided and not value.is_quantized and not value.is_nested:
            self.tensors.append(value.detach())
            return ("tensor", value.dtype, tuple(value.shape))
        if kind in (dict, OrderedDict) or isinstance(value, UserDict):
            return ("mapping", kind, tuple(value), *map(self._describe, value.values()))
        is_sequence = kind in (list, tuple) or is_namedtuple(value)
        if is_sequence and any(isinstance(entry, (Tensor, *_CONTAINERS)) for entry in value):
            return ("sequence", kind, *map(self._describe, value))
        self._others.append(value)
        return ("other",)

    def write(self, buffer: Tensor, offset: int) -> None:
        """Copy the tensors' bytes into a buffer."""
        for tensor in self.tensors:
            size = tensor.nbytes
            if size:
                target = buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape)
                target.copy_(tensor)
            offset += _aligned(size)


class Unpacker:
    """Put a batch together again; its tensors are views of the buffer."""

    def __init__(self, buffer: Tensor, offset: int, others: bytes) -> None:
        self._buffer = buffer
        self._offset = offset
        self._others = iter(pickle.loads(others) if others else ())

    def build(self, node: tuple[Any, ...]) -> Any:
        """Return the value that a description stands for."""
        builder = {"tensor": self._tensor, "mapping": self._mapping, "sequence": self._sequence}.get(node[0])
        return next(self._others) if builder is None else builder(node)

    def _tensor(self, node: tuple[Any, ...]) -> Tensor:
        _, dtype, shape = node
        size = dtype.itemsize
        for length in shape:
            size *= length
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        offset, self._offset = self._offset, self._offset + _aligned(size)
        return self._buffer[offset : offset + size].view(dtype).view(shape)

    def _mapping(self, node: tuple[Any, ...]) -> Any:
        values = [self.build(child) for child in node[3:]]
        entries = dict(zip(node[2], values, strict=True))
        return entries if node[1] is dict else node[1](entries)

    def _sequence(self, node: tuple[Any, ...]) -> Any:
        values = [self.build(child) for child in node[2:]]
        return node[1](*values) if hasattr(node[1], "_fields") else node[1](values)
