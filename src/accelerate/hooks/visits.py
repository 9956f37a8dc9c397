"""The weights of one module, in it while it runs and out of it after."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accelerate.offload.places import META
from accelerate.offload.quantised import scales_name
from accelerate.offload.read_ahead import ReadAhead, Stop
from accelerate.offload.store import OffloadedWeightsLoader
from accelerate.offload.tensors import as_parameter, is_rebuilt, owner_of


class Visit:
    """Put the weights of a module into it when the first of its callers enters, and take them out after the last.

    Several threads may run the module at a time: they use the same tensors, and none takes them away from another.

    Args:
        names: The tensors that are offloaded, as seen from the module.
    """

    def __init__(
        self, engine: ReadAhead, stop: Stop, module: nn.Module, names: list[str], device: torch.device
    ) -> None:
        self.engine, self.stop, self.device = engine, stop, device
        self._names = names
        self._slots = [owner_of(module, name) for name in names]
        self._empty: list[torch.Tensor] = []
        self._users = 0
        self._lock = threading.Lock()

    def is_current(self) -> bool:
        """Return whether the store still has the weights that were found in it."""
        return self.stop.is_current()

    def open(self) -> None:
        """Put the weights in."""
        tensors = self.engine.enter(self.stop)
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._empty = [_tables(owner, key)[key] for owner, key in self._slots]
            for (owner, key), tensor, empty in zip(self._slots, tensors, self._empty, strict=True):
                _tables(owner, key)[key] = self._made_like(empty, tensor, key in owner._parameters)

    def _made_like(self, empty: torch.Tensor, tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor | None:
        with torch.no_grad():
            if tensor.dtype != empty.dtype:  # the dtype of the model was changed since it was dispatched
                tensor = tensor.to(empty.dtype)
            return as_parameter(empty, tensor, self.device) if is_parameter else tensor

    def close(self) -> None:
        """Take the weights out."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for (owner, key), empty in zip(self._slots, self._empty, strict=True):
                    _tables(owner, key)[key] = empty if empty.device == META else _emptied(owner, key, empty)
        self.engine.leave(self.stop)

    @contextmanager
    def kept(self) -> Iterator[dict[str, torch.Tensor]]:
        """Give the weights as the engine has them, which from now on never gives them up."""
        self.engine.keep(self.stop)
        tensors = self.engine.enter(self.stop)
        try:
            yield dict(zip(self._names, tensors, strict=True))
        finally:
            self.engine.leave(self.stop)


def _tables(owner: nn.Module, key: str) -> dict[str, Any]:
    return owner._parameters if key in owner._parameters else owner._buffers


def _emptied(owner: nn.Module, key: str, tensor: torch.Tensor) -> torch.Tensor | None:
    bare = tensor.detach().to(META)
    return as_parameter(tensor, bare, META) if key in owner._parameters else bare


def make_visit(
    engine: ReadAhead, module: nn.Module, prefix: str, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> Visit | None:
    """Return the visits of a module's weights, or None where they have to be fetched one by one.

    Args:
        prefix: What the names of the module's tensors begin with in the store.
        tensors: The offloaded tensors of the module.
    """
    source: OffloadedWeightsLoader = engine.source
    for name, tensor in tensors.items():
        stored = f"{prefix}{name}"
        # Quantised weights are made by their own classes, from several tensors.
        if stored not in source or is_rebuilt(tensor) or (tensor.dtype == torch.int8 and scales_name(stored) in source):
            return None
    if not tensors:
        return None
    stop = engine.register([(f"{prefix}{name}", tensor.dtype) for name, tensor in tensors.items()], device)
    return Visit(engine, stop, module, list(tensors), device)
