"""Copy the state of an optimizer while training goes on, at the latest when the optimizer is about to change it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.parts.host_copy import copy_structure, host_copy
from accelerate.parallel.unwrap import plain_optimizer
from accelerate.runtime import current
from accelerate.runtime.eager import eager_only
from accelerate.runtime.torch_private import register_first_step_hook


class Later:
    """A state that is copied by whoever asks first: the thread that saves, or the optimizer before its next step.

    Forward and backward passes leave the state of an optimizer alone, so training need not stand still for it. Its
    groups of parameters, which schedulers change, and values that are no tensors are copied at once.

    Args:
        state: The state.
        name: What it is of, for messages.
        copy: Returns it in host memory that training does not change.
    """

    def __init__(self, state: Mapping[str, Any], name: str, copy: Callable[[Any], Any]) -> None:
        self._lock = threading.Lock()
        self._name = name
        self._copy = copy
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._written: list[tuple[torch.device, torch.Event]] = []
        self._state = {
            key: copy_structure(value, torch.Tensor.clone if key == "param_groups" else self._watch)
            for key, value in state.items()
        }
        self._follow_streams()
        self._is_settled = False
        self._result: Any = None
        self._error: BaseException | None = None

    def _watch(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))
        return tensor

    def _follow_streams(self) -> None:
        """Note what the accelerators have still to do in this thread before the state is what it is."""
        for device in {tensor.device for tensor, _ in self._versions if tensor.device.type not in ("cpu", "meta")}:
            self._written.append((device, torch.accelerator.current_stream(device).record_event()))

    def settle(self) -> None:
        """Copy the state, or wait for who is copying it; an error is raised by `get`."""
        with self._lock:
            if self._is_settled:
                return
            try:
                self._result = self._copied()
            except BaseException as error:  # noqa: BLE001 - it is raised where the save is waited for
                self._error = error
            self._is_settled = True
            self._state.clear()
            self._versions.clear()

    def _copied(self) -> Any:
        for device, event in self._written:
            torch.accelerator.current_stream(device).wait_event(event)
        result = self._copy(self._state)
        if any(tensor._version != version for tensor, version in self._versions):
            raise CheckpointError(
                f"The state of {self._name} was changed while it was being copied, and not by a step of the optimizer, "
                "which waits for the copy. Call accelerator.wait_for_save() before you change it, or save with "
                "blocking=True."
            )
        return result

    def get(self) -> Any:
        """Return the copy.

        Raises:
            CheckpointError: If the state was changed meanwhile by something else than a step.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        return self._result


class _Gate:
    """Lets an optimizer step once its state is copied."""

    def __init__(self) -> None:
        self._waiting: weakref.ref[Later] | None = None

    def wait_for(self, later: Later) -> None:
        self._waiting = weakref.ref(later)

    @eager_only
    def let_pass(self, *_: Any) -> None:
        if self._waiting is not None:
            later, self._waiting = self._waiting(), None
            if later is not None:
                later.settle()


def _gate_of(optimizer: torch.optim.Optimizer) -> _Gate:
    gates: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Gate]
    gates = current.remember("optimizer gates", weakref.WeakKeyDictionary)
    if optimizer not in gates:
        gates[optimizer] = _Gate()
        register_first_step_hook(optimizer, gates[optimizer].let_pass)  # others may change the state
    return gates[optimizer]


def copied_before_step(
    optimizer: Any, state: Mapping[str, Any], name: str, copy: Callable[[Any], Any] | None = None
) -> Any:
    """Return a copy of an optimizer's state, or the promise of one where the optimizer can be made to wait for it.

    Args:
        optimizer: The optimizer, prepared or not.
        name: What it is called in messages.
        copy: Returns the state in host memory; by default in memory that is lent.
    """
    inner = plain_optimizer(optimizer)
    # Of other optimizers it is not known that nothing but `step` changes their state.
    if not type(inner).__module__.startswith("torch.optim."):
        return (copy or host_copy)(state)
    # One thread: training needs the others.
    later = Later(state, name, copy or (lambda value: host_copy(value, num_threads=1)))
    _gate_of(inner).wait_for(later)
    return later


def settled(payload: Any) -> Any:
    """Return a snapshot, copied by now.

    Raises:
        CheckpointError: If it was changed meanwhile.
    """
    return payload.get() if isinstance(payload, Later) else payload
