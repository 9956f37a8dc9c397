"""Give every rank the weights of the first one, module by module, before they are sharded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate.collectives import communicator
from accelerate.parallel.unwrap import plain_name
from accelerate.runtime.memory import trim_host_memory
from accelerate.runtime.torch_private import Piece
from accelerate.strategies.fsdp.sending import Sender


@dataclass
class _Entry:
    """One tensor of the model as the first rank has it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool | None
    """None for a buffer."""


@dataclass
class Waiting:
    """A tensor that is in the model and gets its values once the module around it is sharded."""

    entry: _Entry
    source: torch.Tensor | None
    """Its values, on the first rank."""


class Filler:
    """Send parameters and buffers from the first rank to the others, a module at a time.

    Where a module is sharded in between, weights without memory are stood in for by one stretch of memory that nobody
    writes to: a rank then holds its shards and, while it receives, a stretch of one tensor. Parameters that are one
    tensor on the first rank become one on all.

    Args:
        model: The model; on the first rank with its weights, on the others with or without.
        device: Where weights get memory, and what the group sends.

    Raises:
        ConfigurationError: If the first rank has no weights either.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.communicator = communicator()
        self._sender = Sender(self.communicator, device)
        table: list[Any] = [_table(model) if self.communicator.rank == 0 else None]
        self.communicator.broadcast_objects(table)
        if isinstance(table[0], str):
            raise ConfigurationError(
                f"The weight {table[0]!r} has no memory on the first rank, so there is nothing to send to the others. "
                "Load the weights on the first rank, or set param_init_fn of the plugin."
            )
        self.waiting: list[_Entry] = table[0]
        self._stand_in: torch.Tensor | None = None
        self._largest = max((math.prod(entry.shape) * entry.dtype.itemsize for entry in self.waiting), default=0)

    def fill(self, unit: str) -> None:
        """Fill what is not filled yet of the module called `unit`; "" is the model."""
        self.send([self._settle(entry, shared=False) for entry in self._take(unit)])

    def place(self, unit: str) -> list[Waiting]:
        """Put a tensor of the right shape in place of each one of a module that is to be sharded now, and then sent."""
        return [self._settle(entry, shared=True) for entry in self._take(unit)]

    def send(self, tensors: list[Waiting], pieces: Mapping[str, Piece] | None = None) -> None:
        """Give tensors of the model their values, in whatever way they are spread by now.

        Args:
            tensors: What `place` returned; a whole tensor is let go of as soon as it was sent.
            pieces: Where this rank keeps its piece of a parameter that was joined with others, by the name in the
                user's model.
        """
        tensors.reverse()
        while tensors:
            waiting = tensors.pop()
            names = [plain_name(name) for name in waiting.entry.names]
            piece = next((pieces[name] for name in names if name in pieces), None) if pieces else None
            if piece is not None:
                self._sender.send_to_piece(waiting.source, piece)
                continue
            owner, attribute = self._place(waiting.entry.names[0])
            tensor: torch.Tensor = getattr(owner, attribute)
            if self._is_stand_in(tensor):
                # Left alone by the engine: it keeps its identity, which the engine may have noted.
                tensor.data = torch.empty_like(tensor)
            self._sender.send_to_part(waiting.source, tensor)
        self._sender.release()
        trim_host_memory()

    def _take(self, unit: str) -> list[_Entry]:
        prefix = f"{unit}." if unit else ""
        # A unit never shares a parameter with the outside, so one name tells where it belongs.
        mine = [entry for entry in self.waiting if entry.names[0].startswith(prefix)]
        self.waiting = [entry for entry in self.waiting if not entry.names[0].startswith(prefix)]
        return mine

    def _settle(self, entry: _Entry, *, shared: bool) -> Waiting:
        """Put this rank's tensor in place under all its names, with memory or with the one that stands in for it."""
        places = [self._place(name) for name in entry.names]
        owner, attribute = places[0]
        tensor: torch.Tensor = getattr(owner, attribute)
        if tensor.is_meta or tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
            stands_in = shared and entry.requires_grad is not None
            tensor = (
                self._borrow(entry) if stands_in else torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
            )
            if entry.requires_grad is not None:
                tensor = nn.Parameter(tensor, requires_grad=entry.requires_grad)
        for owner, attribute in places:
            held = owner._buffers if entry.requires_grad is None else owner._parameters
            held[attribute] = tensor  # type: ignore[assignment]
        return Waiting(entry, tensor.detach() if self.communicator.rank == 0 else None)

    def _borrow(self, entry: _Entry) -> torch.Tensor:
        """Return a tensor in the memory that stands in for all: read it may be, and then holds anything."""
        if self._stand_in is None:
            self._stand_in = torch.empty(self._largest, dtype=torch.uint8, device=self.device)
        needed = math.prod(entry.shape) * entry.dtype.itemsize
        return self._stand_in[:needed].view(entry.dtype).view(entry.shape)

    def _is_stand_in(self, tensor: torch.Tensor) -> bool:
        if self._stand_in is None or isinstance(tensor, DTensor):
            return False
        return tensor.untyped_storage().data_ptr() == self._stand_in.untyped_storage().data_ptr()

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self.model.get_submodule(path), attribute


def _table(model: nn.Module) -> list[_Entry] | str:
    """Return what the first rank has, or the name of a weight without memory."""
    found: dict[int, _Entry] = {}
    for is_buffer, named in ((False, model.named_parameters), (True, model.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            if tensor.is_meta:
                return name
            entry = found.get(id(tensor))
            if entry is not None:
                entry.names = (*entry.names, name)
                continue
            trains = None if is_buffer else tensor.requires_grad
            found[id(tensor)] = _Entry((name,), tuple(tensor.shape), tensor.dtype, trains)
    return list(found.values())


def require_memory(model: nn.Module, initialise: Any) -> None:
    """Give memory to weights that have none by the plugin's function, or refuse them.

    Raises:
        ConfigurationError: If there is no such function.
    """
    without = next((name for name, weight in model.named_parameters() if weight.is_meta), None)
    if without is None:
        return
    if initialise is None:
        raise ConfigurationError(
            f"The weight {without!r} of {type(model).__name__} has no memory (it is on the meta device), and nothing says "
            "where its values come from. Set cpu_ram_efficient_loading=True and load the weights on the first rank, or "
            "set param_init_fn."
        )
    for module in model.modules():
        if any(weight.is_meta for weight in module.parameters(recurse=False)):
            initialise(module)


def fill_from_first(state: dict[Any, Any], whole: Mapping[Any, Any]) -> None:
    """Fill the tensors of a nested state from a whole one that the first rank has, and replace its other values.

    Tensors are sent one after another, in stretches, so that a rank holds little beside its shards.

    Args:
        state: The state as this run lays it out; it has the same entries on all ranks.
        whole: The whole state; empty on other ranks.

    Raises:
        CheckpointError: If an entry is missing in it, or has another shape.
    """
    ranks = communicator()
    entries = list(_leaves(state, whole, ranks.rank == 0, ()))
    others: list[Any] = [
        [_reason(entry) for entry in entries] if ranks.rank == 0 else None,
        [None if isinstance(entry.here, torch.Tensor) else entry.there for entry in entries],
    ]
    ranks.broadcast_objects(others)
    wrong = next((reason for reason in others[0] if reason), None)
    if wrong is not None:
        raise CheckpointError(f"{wrong} Build the model and the optimizer as they were when the checkpoint was saved.")
    sender = Sender(ranks)
    for entry, other in zip(entries, others[1], strict=True):
        if isinstance(entry.here, torch.Tensor):
            sender.send_to_part(entry.there, entry.here)
        else:
            entry.holder[entry.key] = other


@dataclass
class _Leaf:
    """One value of a nested state, here and on the first rank."""

    holder: dict[Any, Any]
    key: Any
    path: str
    here: Any
    there: Any


_MISSING = object()


def _leaves(state: dict[Any, Any], whole: Any, is_first: bool, path: tuple[str, ...]) -> Iterator[_Leaf]:
    for key, here in state.items():
        there = whole.get(key, _MISSING) if is_first and isinstance(whole, Mapping) else _MISSING
        where = (*path, str(key))
        if isinstance(here, dict):
            yield from _leaves(here, there if isinstance(there, Mapping) else {}, is_first, where)
        else:
            yield _Leaf(state, key, ".".join(where), here, there if is_first else None)


def _reason(entry: _Leaf) -> str | None:
    if entry.there is _MISSING:
        return f"{entry.path!r} is not in the checkpoint."
    if isinstance(entry.here, torch.Tensor) and tuple(entry.here.shape) != tuple(entry.there.shape):
        return (
            f"{entry.path!r} has the shape {tuple(entry.there.shape)} in the checkpoint, not {tuple(entry.here.shape)}."
        )
    return None
