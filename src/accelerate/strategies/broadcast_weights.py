"""How the weights and states of rank 0 reach all ranks, each of which may keep a part of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate.collectives.base import Communicator, communicator
from accelerate.parallel.mesh import averaging_group, axis_group
from accelerate.parallel.unwrap import plain_name
from accelerate.runtime.memory import trim_host_memory
from accelerate.runtime.torch_private_fsdp import Piece
from accelerate.strategies.tools import local, ranks_in

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Long enough to use the network well, and little beside the shards of a model that is worth sharding.
CHUNK_BYTES = 2**22


class ChunkedBroadcast:
    """Fill the parts that ranks have of tensors from the full ones of rank 0.

    Args:
        ranks: Who takes part.
        device: Where the group sends from; by default where a tensor lies.
    """

    def __init__(self, ranks: Communicator, device: torch.device | None = None) -> None:
        self.ranks = ranks
        self._device = device
        self._buffer: torch.Tensor | None = None

    def fill(self, source: torch.Tensor | None, here: torch.Tensor) -> None:
        """Fill this rank's part of a tensor, which is split in some way or not at all.

        Args:
            source: The full tensor, on rank 0.
            here: The tensor of this rank.
        """
        source = None if source is None else source.to(here.dtype)
        piece = _piece_of(here)
        if piece is not None:
            self.fill_piece(source, piece)
            return
        target = local(here)
        device = self._device or target.device
        if source is not None:
            tensor = source.detach().to(device).contiguous()
        else:
            tensor = torch.empty(here.shape, dtype=here.dtype, device=device)
        self.ranks.broadcast(tensor)
        if isinstance(here, DTensor):
            tensor = distribute_tensor(tensor, here.device_mesh, here.placements, src_data_rank=None).to_local()
        with torch.no_grad():
            target.copy_(tensor)

    def fill_piece(self, source: torch.Tensor | None, piece: Piece) -> None:
        """Send a tensor in chunks, of which each rank copies what falls into its piece."""
        flat = None if source is None else source.detach().reshape(-1)
        device = self._device or piece.held.device
        step = max(1, CHUNK_BYTES // piece.held.element_size())
        for begin in range(0, piece.whole, step):
            count = min(step, piece.whole - begin)
            if flat is not None:
                chunk = flat[begin : begin + count].to(device)
            else:
                chunk = self._receive_buffer(count, piece.held.dtype, device)
            self.ranks.broadcast(chunk)
            piece.take(chunk, begin)

    def release(self) -> None:
        """Free the memory that was received into."""
        self._buffer = None

    def _receive_buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory to receive into, the same one every time: memory of its own for each would add up."""
        needed = count * dtype.itemsize
        if self._buffer is None or self._buffer.nbytes < needed or self._buffer.device != device:
            self.release()  # before there is another
            self._buffer = torch.empty(needed, dtype=torch.uint8, device=device)
        return self._buffer[:needed].view(dtype)


def _piece_of(here: torch.Tensor) -> Piece | None:
    """Return what this rank has of a tensor as one run of its numbers; None where it is not one run."""
    if hasattr(here, "local_shards"):  # torch's old ShardedTensor, which FSDP 1 makes without a mesh and cuts by rows
        whole = math.prod(here.shape)
        for shard in here.local_shards():
            begin = shard.metadata.shard_offsets[0] * (whole // here.shape[0])
            return Piece(shard.tensor.view(-1), 0, begin, shard.tensor.numel(), whole)
        return Piece(torch.empty(0, dtype=here.dtype), 0, 0, 0, whole)
    held = local(here.detach())
    if not held.is_contiguous():
        return None
    begin = 0
    if isinstance(here, DTensor):
        mesh = here.device_mesh
        splits = [(axis, item) for axis, item in enumerate(here.placements) if not item.is_replicate()]
        if len(splits) > 1 or not all(type(item) is Shard and item.dim == 0 for _, item in splits):
            return None
        for axis, _ in splits:
            rows = -(-here.shape[0] // mesh.size(axis))
            begin = mesh.get_local_rank(axis) * rows * (here.numel() // max(1, here.shape[0]))
    return Piece(held.view(-1), 0, begin, held.numel(), here.numel())


@dataclass
class PendingTensor:
    """One tensor of the model as rank 0 has it, and, there alone, its values until they are sent."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool | None
    """None for a buffer."""
    source: torch.Tensor | None = None


class WeightBroadcast:
    """Send parameters and buffers from rank 0 to the others, a module at a time.

    Where a module is sharded in between, weights without memory are stood in for by one block of memory that nobody
    writes to: a rank then holds its shards and, while it receives, a chunk of one tensor. Parameters that are one
    tensor on rank 0 become one on all.

    Args:
        model: The model; on rank 0 with its weights, on the others with or without.
        device: Where weights get memory, and what the group sends.

    Raises:
        ConfigurationError: If rank 0 has no weights either.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        ranks = communicator()
        self._is_source = ranks.rank == 0
        self._sender = ChunkedBroadcast(ranks, device)
        table: list[Any] = [_tensor_table(model) if self._is_source else None]
        ranks.broadcast_objects(table)
        if isinstance(table[0], str):
            raise ConfigurationError(
                f"The weight {table[0]!r} has no memory on the first rank, so there is nothing to send to the others. "
                "Load the weights on the first rank, or set param_init_fn of the plugin."
            )
        self._left: list[PendingTensor] = table[0]
        self._placeholder: torch.Tensor | None = None
        self._largest = max((math.prod(entry.shape) * entry.dtype.itemsize for entry in self._left), default=0)

    def send_all(self) -> None:
        """Fill what is not filled yet of the model."""
        self.send([self._put_in_place(entry, placeholder=False) for entry in self._take("")])

    def allocate(self, unit: str) -> list[PendingTensor]:
        """Put a tensor of the right shape in place of each one of a module that is to be sharded now, and then sent.

        Args:
            unit: The name of the module; "" is the model.
        """
        return [self._put_in_place(entry, placeholder=True) for entry in self._take(unit)]

    def send(self, tensors: list[PendingTensor], pieces: Mapping[str, Piece] | None = None) -> None:
        """Give tensors of the model their values, in whatever way they are split by now.

        Args:
            tensors: What `allocate` returned; a full tensor is freed as soon as it was sent.
            pieces: Where this rank keeps its piece of a parameter that was joined with others, by the name in the
                user's model.
        """
        tensors.reverse()
        while tensors:
            pending = tensors.pop()
            names = [plain_name(name) for name in pending.names]
            piece = next((pieces[name] for name in names if name in pieces), None) if pieces else None
            if piece is not None:
                self._sender.fill_piece(pending.source, piece)
                continue
            owner, attribute = self._owner(pending.names[0])
            tensor: torch.Tensor = getattr(owner, attribute)
            if self._is_placeholder(tensor):
                # Left alone by the engine: it keeps its identity, which the engine may have noted.
                tensor.data = torch.empty_like(tensor)
            self._sender.fill(pending.source, tensor)
        self._sender.release()
        trim_host_memory()

    def _take(self, unit: str) -> list[PendingTensor]:
        prefix = f"{unit}." if unit else ""
        # A unit never shares a parameter with the outside, so one name tells where it belongs.
        taken = [entry for entry in self._left if entry.names[0].startswith(prefix)]
        self._left = [entry for entry in self._left if not entry.names[0].startswith(prefix)]
        return taken

    def _put_in_place(self, entry: PendingTensor, *, placeholder: bool) -> PendingTensor:
        """Put this rank's tensor in place under all its names, with memory of its own or as a placeholder."""
        owners = [self._owner(name) for name in entry.names]
        tensor: torch.Tensor = getattr(*owners[0])
        if tensor.is_meta or tuple(tensor.shape) != entry.shape or tensor.dtype != entry.dtype:
            if placeholder and entry.requires_grad is not None:
                if self._placeholder is None:
                    self._placeholder = torch.empty(self._largest, dtype=torch.uint8, device=self.device)
                needed = math.prod(entry.shape) * entry.dtype.itemsize
                tensor = self._placeholder[:needed].view(entry.dtype).view(entry.shape)
            else:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self.device)
            if entry.requires_grad is not None:
                tensor = nn.Parameter(tensor, requires_grad=entry.requires_grad)
        for owner, attribute in owners:
            held = owner._buffers if entry.requires_grad is None else owner._parameters
            held[attribute] = tensor  # type: ignore[assignment]
        entry.source = tensor.detach() if self._is_source else None
        return entry

    def _is_placeholder(self, tensor: torch.Tensor) -> bool:
        if self._placeholder is None or isinstance(tensor, DTensor):
            return False
        return tensor.untyped_storage().data_ptr() == self._placeholder.untyped_storage().data_ptr()

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        return self.model.get_submodule(path), attribute


def _tensor_table(model: nn.Module) -> list[PendingTensor] | str:
    """Return what rank 0 has, or the name of a weight without memory."""
    found: dict[int, PendingTensor] = {}
    for is_buffer, named in ((False, model.named_parameters), (True, model.named_buffers)):
        for name, tensor in named(remove_duplicate=False):
            if tensor.is_meta:
                return name
            entry = found.get(id(tensor))
            if entry is not None:
                entry.names = (*entry.names, name)
                continue
            trains = None if is_buffer else tensor.requires_grad
            found[id(tensor)] = PendingTensor((name,), tuple(tensor.shape), tensor.dtype, trains)
    return list(found.values())


def require_memory(model: nn.Module, initialise: Callable[[nn.Module], Any] | None) -> None:
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


def equal_weights_step(mesh: DeviceMesh | None) -> Callable[[nn.Module], nn.Module] | None:
    """Return the step that gives all ranks of a model equal weights; None where each holds its own.

    Weights split over a group were cut out of the first rank's; those that each of its ranks holds must be equal too, or
    ranks of one model would compute with different layers.
    """
    tensor, replicas = axis_group(mesh, MeshAxis.TP), averaging_group(mesh)
    if tensor is None and replicas is None:
        return None

    def take_weights_of_first(model: nn.Module) -> nn.Module:
        for group in (tensor, replicas):
            if group is not None:
                _broadcast_in_group(model, group)
        return model

    return take_weights_of_first


@torch.no_grad()
def _broadcast_in_group(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks of a group the parameters and buffers of its first, except those laid out over the group itself."""
    source = dist.get_process_group_ranks(group)[0]
    for tensor in [*model.parameters(), *model.buffers()]:
        if len(ranks_in(tensor, group)) == 1:
            own = local(tensor.detach()).contiguous()
            dist.broadcast(own, source, group=group)
            local(tensor.detach()).copy_(own)


@dataclass
class _StateEntry:
    """One value of a nested state, here and on rank 0."""

    holder: dict[Any, Any]
    key: Any
    path: str
    here: Any
    source: Any


_MISSING = object()


def broadcast_state(state: dict[Any, Any], full: Mapping[Any, Any]) -> None:
    """Fill the tensors of a nested state from a full one that rank 0 has, and replace its other values.

    Tensors are sent one after another, in chunks, so that a rank holds little beside its shards.

    Args:
        state: The state as this run lays it out; it has the same entries on all ranks.
        full: The full state; empty on other ranks.

    Raises:
        CheckpointError: If an entry is missing in it, or has another shape.
    """
    ranks = communicator()
    entries = list(_entries(state, full, ranks.rank == 0, ()))
    shared: list[Any] = [
        next((reason for reason in map(_mismatch, entries) if reason), None) if ranks.rank == 0 else None,
        [None if isinstance(entry.here, torch.Tensor) else entry.source for entry in entries],
    ]
    ranks.broadcast_objects(shared)
    reason, values = shared
    if reason is not None:
        raise CheckpointError(f"{reason} Build the model and the optimizer as they were when the checkpoint was saved.")
    sender = ChunkedBroadcast(ranks)
    for entry, value in zip(entries, values, strict=True):
        if isinstance(entry.here, torch.Tensor):
            sender.fill(entry.source, entry.here)
        else:
            entry.holder[entry.key] = value


def _entries(state: dict[Any, Any], full: Any, is_first: bool, path: tuple[str, ...]) -> Iterator[_StateEntry]:
    for key, here in state.items():
        source = full.get(key, _MISSING) if is_first and isinstance(full, Mapping) else _MISSING
        inner = (*path, str(key))
        if isinstance(here, dict):
            yield from _entries(here, source if isinstance(source, Mapping) else {}, is_first, inner)
        else:
            yield _StateEntry(state, key, ".".join(inner), here, source if is_first else None)


def _mismatch(entry: _StateEntry) -> str | None:
    if entry.source is _MISSING:
        return f"{entry.path!r} is not in the checkpoint."
    if isinstance(entry.here, torch.Tensor) and tuple(entry.here.shape) != tuple(entry.source.shape):
        return (
            f"{entry.path!r} has the shape {tuple(entry.source.shape)} in the checkpoint, "
            f"not {tuple(entry.here.shape)}."
        )
    return None
