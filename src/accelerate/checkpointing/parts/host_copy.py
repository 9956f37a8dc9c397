"""Copy a state to host memory, so that training can change the original."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from accelerate._base import pages
from accelerate.checkpointing.helper_thread import run_side_by_side
from accelerate.offload.tensors import identity_in_memory
from accelerate.runtime import current

_BUFFERS = "checkpoint buffers"
_WORTH_IT = 32 * 2**20
"""The bytes from which on several threads copy."""
_PIECE = 8 * 2**20
_NUM_THREADS = 4


class HostBuffers:
    """The memory of the last copy, used again for the next one.

    Fresh memory is handed out by the system page by page, which takes several times longer than the copy itself. It is
    kept until the run is reset.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, list[torch.Tensor]] = defaultdict(list)
        self._used: list[tuple[Hashable, torch.Tensor]] = []

    def take(self, tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return host memory in the form of a tensor, and whether it is fresh; pinned if the tensor is on an accelerator."""
        pinned = tensor.device.type != "cpu"
        form = (tensor.shape, tensor.stride(), tensor.dtype, pinned)
        found = self._free[form]
        is_fresh = not found
        buffer = torch.empty_like(tensor, device="cpu", pin_memory=pinned) if is_fresh else found.pop()
        self._used.append((form, buffer))
        return buffer, is_fresh

    def release(self) -> None:
        """Take back what was handed out, and let go of what the last copy did not need."""
        self._free.clear()
        for form, buffer in self._used:
            self._free[form].append(buffer)
        self._used.clear()


def host_buffers() -> HostBuffers:
    """Return the buffers of this run."""
    return current.remember(_BUFFERS, HostBuffers)


def host_copy(value: Any, *, num_threads: int | None = None) -> Any:
    """Return `value` with every tensor copied to host memory; tensors that share memory share the copy.

    Copies from an accelerator go to pinned memory and run side by side; they are complete when this returns. The memory
    is lent: it is used for something else after `host_buffers().release()`.

    Args:
        num_threads: How many threads copy from host memory; by default as many as help.
    """
    copier = _Copier(host_buffers())
    copied = copy_structure(value, copier.copy)
    copier.finish(num_threads or min(_NUM_THREADS, os.cpu_count() or 1))
    return copied


def copy_structure(value: Any, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a copy of a nested state whose tensors come from a function, which is given them without gradients."""
    if isinstance(value, torch.Tensor):
        return copy_tensor(value.detach())
    if isinstance(value, dict):
        entries = {key: copy_structure(entry, copy_tensor) for key, entry in value.items()}
        same_kind = copy.copy(value)  # with what a subclass holds beside its entries
        same_kind.update(entries)
        return same_kind
    if type(value) in (list, tuple):
        return type(value)(copy_structure(entry, copy_tensor) for entry in value)
    return copy.deepcopy(value)


@dataclass
class _Piece:
    """A part of a copy between host memory, of which several threads can do one each."""

    target: torch.Tensor
    source: torch.Tensor
    is_fresh: bool

    def copy(self) -> None:
        if self.is_fresh:
            pages.populate_fresh(self.target.data_ptr(), self.target.nbytes)
        self.target.copy_(self.source)


class _Copier:
    def __init__(self, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._copies: dict[Hashable, torch.Tensor] = {}
        self._devices: set[torch.device] = set()
        self._waiting: list[_Piece] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        identity = identity_in_memory(tensor) if tensor.layout is torch.strided else None
        if identity is None:
            return tensor.cpu().clone()
        if identity not in self._copies:
            buffer, is_fresh = self._buffers.take(tensor)
            self._copies[identity] = buffer
            if tensor.device.type == "cpu":
                self._waiting += _pieces(buffer, tensor, is_fresh)
            else:
                buffer.copy_(tensor, non_blocking=True)
                self._devices.add(tensor.device)
        return self._copies[identity]

    def finish(self, num_threads: int) -> None:
        nbytes = sum(piece.source.nbytes for piece in self._waiting)
        run_side_by_side(_Piece.copy, self._waiting, num_threads if nbytes >= _WORTH_IT else 1)
        for device in self._devices:
            torch.accelerator.synchronize(device)


def _pieces(target: torch.Tensor, source: torch.Tensor, is_fresh: bool) -> list[_Piece]:
    if source.nbytes <= _PIECE or not (source.is_contiguous() and target.is_contiguous()):
        return [_Piece(target, source, is_fresh)]
    count = -(-source.nbytes // _PIECE)
    pairs = zip(target.view(-1).chunk(count), source.view(-1).chunk(count), strict=True)
    return [_Piece(*pair, is_fresh) for pair in pairs]
