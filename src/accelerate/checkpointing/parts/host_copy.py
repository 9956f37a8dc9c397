"""Copy a state to host memory, so that training can change the original."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch

from ...offload.tensors import identity_in_memory
from ...runtime import current

_BUFFERS = "checkpoint buffers"


class HostBuffers:
    """The memory of the last copy, used again for the next one.

    Fresh memory is handed out by the system page by page, which takes several times longer than the copy itself. It is
    kept until the run is reset.
    """

    def __init__(self) -> None:
        self._free: defaultdict[Hashable, list[torch.Tensor]] = defaultdict(list)
        self._used: list[tuple[Hashable, torch.Tensor]] = []

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory in the form of a tensor; pinned if the tensor is on an accelerator."""
        pinned = tensor.device.type != "cpu"
        form = (tensor.shape, tensor.stride(), tensor.dtype, pinned)
        found = self._free[form]
        buffer = found.pop() if found else torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        self._used.append((form, buffer))
        return buffer

    def release(self) -> None:
        """Take back what was handed out, and let go of what the last copy did not need."""
        self._free.clear()
        for form, buffer in self._used:
            self._free[form].append(buffer)
        self._used.clear()


def host_buffers() -> HostBuffers:
    """Return the buffers of this run."""
    return current.remember(_BUFFERS, HostBuffers)


def host_copy(value: Any) -> Any:
    """Return `value` with every tensor copied to host memory; tensors that share memory share the copy.

    Copies from an accelerator go to pinned memory and run side by side; they are complete when this returns. The memory
    is lent: it is used for something else after `host_buffers().release()`.
    """
    copier = _Copier(host_buffers())
    copied = copier.copy(value)
    copier.finish()
    return copied


class _Copier:
    def __init__(self, buffers: HostBuffers) -> None:
        self._buffers = buffers
        self._copies: dict[Hashable, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value.detach())
        if isinstance(value, dict):
            entries = {key: self.copy(entry) for key, entry in value.items()}
            same_kind = copy.copy(value)  # with what a subclass holds beside its entries
            same_kind.update(entries)
            return same_kind
        if type(value) in (list, tuple):
            return type(value)(self.copy(entry) for entry in value)
        return copy.deepcopy(value)

    def finish(self) -> None:
        for device in self._devices:
            torch.accelerator.synchronize(device)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        identity = identity_in_memory(tensor) if tensor.layout is torch.strided else None
        if identity is None:
            return tensor.cpu().clone()
        if identity not in self._copies:
            self._copies[identity] = self._buffers.take(tensor)
            self._copies[identity].copy_(tensor, non_blocking=True)
            if tensor.device.type != "cpu":
                self._devices.add(tensor.device)
        return self._copies[identity]
