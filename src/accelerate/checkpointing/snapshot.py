"""The states of a run's parts at one moment, copied to host memory where training goes on while they are written.

An optimizer's state is copied while the next forward and backward passes run: nothing but its step changes it, and the
step waits for the copy.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from accelerate._base import pages
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.parts import Part
from accelerate.checkpointing.torch_files import on_host
from accelerate.devices import registry
from accelerate.offload.safetensors_format import identity_in_memory
from accelerate.parallel.unwrap import plain_optimizer
from accelerate.runtime import current
from accelerate.runtime.torch_private import eager_only, register_first_step_hook

T = TypeVar("T")
_THREADS_FROM = 32 * 2**20
"""The bytes from which on several threads copy."""
_CHUNK = 8 * 2**20
_NUM_THREADS = 4


class Snapshot:
    """The states of parts, in the order of the parts.

    Args:
        parts: What is saved on this rank.
    """

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self._backend = current.runtime().backend
        self._backend.end_step()
        self._states = [(part, part.snapshot()) for part in parts]
        self._buffers: HostBuffers | None = None

    def copy_to_host(self) -> None:
        """Make the states independent of what training does next; those of optimizers follow until their next step."""
        self._buffers = host_buffers()
        # After all states are there: making one may need all ranks, and a copy that fails must not keep them waiting.
        # What a device records is carried out here: another thread would end the steps of this one.
        records = self._backend.records_operations
        self._states = [
            (part, host_copy(state) if records else _independent(part, state)) for part, state in self._states
        ]

    def resolve(self) -> None:
        """Wait until all states are copied.

        Raises:
            CheckpointError: If one was changed meanwhile by something else than a step.
        """
        self._states = [
            (part, state.get() if isinstance(state, DeferredCopy) else state) for part, state in self._states
        ]
        if self._backend.records_operations:
            # A file must not name such a device: reading it would need one.
            self._states = [(part, on_host(state)) for part, state in self._states]

    def __iter__(self) -> Iterator[tuple[Part, Any]]:
        return iter(self._states)

    def release(self) -> None:
        """Forget the states; the memory of their copies is free for the next one."""
        self._states.clear()
        if self._buffers is not None:
            self._buffers.release()


def _independent(part: Part, state: Any) -> Any:
    optimizer = getattr(part, "optimizer", None)
    return host_copy(state) if optimizer is None else copy_before_step(optimizer, state, part.name)


def copy_before_step(
    optimizer: Any, state: Mapping[str, Any], name: str, copy: Callable[[Any], Any] | None = None
) -> Any:
    """Return a copy of an optimizer's state, deferred where the optimizer can be made to wait for it.

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
    deferred = DeferredCopy(state, name, copy or (lambda value: host_copy(value, num_threads=1)))
    gates: weakref.WeakKeyDictionary[torch.optim.Optimizer, _StepGate]
    gates = current.remember("optimizer gates", weakref.WeakKeyDictionary)
    if inner not in gates:
        gates[inner] = _StepGate()
        register_first_step_hook(inner, gates[inner].before_step)  # others may change the state
    gates[inner].deferred = weakref.ref(deferred)
    return deferred


class DeferredCopy:
    """A state that is copied by whoever asks first: the thread that saves, or the optimizer before its next step.

    Its groups of parameters, which schedulers change, and values that are no tensors are copied at once.

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
        self._state = {
            key: copy_structure(value, torch.Tensor.clone if key == "param_groups" else self._watch)
            for key, value in state.items()
        }
        # What the accelerators have still to do in this thread before the state is what it is.
        devices = {tensor.device for tensor, _ in self._versions if tensor.device.type not in ("cpu", "meta")}
        self._written = [(device, torch.accelerator.current_stream(device).record_event()) for device in devices]
        self._is_done = False
        self._result: Any = None
        self._error: BaseException | None = None

    def _watch(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))
        return tensor

    def run(self) -> None:
        """Copy the state, or wait for who is copying it; an error is raised by `get`."""
        with self._lock:
            if self._is_done:
                return
            try:
                for device, event in self._written:
                    torch.accelerator.current_stream(device).wait_event(event)
                self._result = self._copy(self._state)
                self._check_unchanged()
            except BaseException as error:  # noqa: BLE001 - it is raised where the save is waited for
                self._error = error
            self._is_done = True
            self._state.clear()
            self._versions.clear()

    def _check_unchanged(self) -> None:
        if any(tensor._version != version for tensor, version in self._versions):
            raise CheckpointError(
                f"The state of {self._name} was changed while it was being copied, and not by a step of the optimizer, "
                "which waits for the copy. Call accelerator.wait_for_save() before you change it, or save with "
                "blocking=True."
            )

    def get(self) -> Any:
        """Return the copy.

        Raises:
            CheckpointError: If the state was changed meanwhile by something else than a step.
        """
        self.run()
        if self._error is not None:
            raise self._error
        return self._result


class _StepGate:
    """Lets an optimizer step once its state is copied."""

    deferred: weakref.ref[DeferredCopy] | None = None

    @eager_only
    def before_step(self, *_: Any) -> None:
        if self.deferred is not None:
            deferred, self.deferred = self.deferred(), None
            if deferred is not None:
                deferred.run()


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
    return current.remember("checkpoint buffers", HostBuffers)


def host_copy(value: Any, *, num_threads: int | None = None) -> Any:
    """Return `value` with every tensor copied to host memory; tensors that share memory share the copy.

    Copies from an accelerator go to pinned memory and run side by side; they are complete when this returns. The memory
    is lent: it is used for something else after `host_buffers().release()`. Shards of a DTensor stay shards.

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
class _Chunk:
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
        self._chunks: list[_Chunk] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        is_plain = tensor.layout is torch.strided and not hasattr(tensor, "full_tensor")
        identity = identity_in_memory(tensor) if is_plain else None
        if identity is None:
            return tensor.to("cpu", copy=True)
        if identity not in self._copies:
            self._copies[identity] = self._begin(tensor)
        return self._copies[identity]

    def _begin(self, tensor: torch.Tensor) -> torch.Tensor:
        if registry.get(tensor.device).records_operations:
            return tensor.cpu()  # its memory is not at hand
        buffer, is_fresh = self._buffers.take(tensor)
        if tensor.device.type == "cpu":
            self._add_chunks(buffer, tensor, is_fresh)
        else:
            buffer.copy_(tensor, non_blocking=True)
            self._devices.add(tensor.device)
        return buffer

    def _add_chunks(self, target: torch.Tensor, source: torch.Tensor, is_fresh: bool) -> None:
        if source.nbytes <= _CHUNK or not (source.is_contiguous() and target.is_contiguous()):
            self._chunks.append(_Chunk(target, source, is_fresh))
            return
        count = -(-source.nbytes // _CHUNK)
        pairs = zip(target.view(-1).chunk(count), source.view(-1).chunk(count), strict=True)
        self._chunks += [_Chunk(*pair, is_fresh) for pair in pairs]

    def finish(self, num_threads: int) -> None:
        nbytes = sum(chunk.source.nbytes for chunk in self._chunks)
        run_in_threads(_Chunk.copy, self._chunks, num_threads if nbytes >= _THREADS_FROM else 1)
        for device in self._devices:
            torch.accelerator.synchronize(device)


def run_in_threads(function: Callable[[T], object], items: Iterable[T], num_threads: int) -> None:
    """Call a function with each item, in several threads, one of which is this one.

    Raises:
        Exception: What the function raised first; items that no thread had begun are left out then.
    """
    waiting, failures = deque(items), deque[BaseException]()

    def work() -> None:
        while not failures:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                function(item)
            except BaseException as error:  # noqa: BLE001 - the caller sees it
                failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
