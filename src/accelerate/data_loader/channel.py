"""The channel between the process that reads and those that receive: one message a step, sent ahead of its use."""

from __future__ import annotations

import itertools
import pickle
from collections import OrderedDict, UserDict, deque
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate._base.errors import UsageError
from accelerate.collectives.nested import is_namedtuple
from accelerate.runtime import current

_HEADER_BYTES = 16 * 8
_FIRST_CAPACITY = 1 << 12
_MAX_IN_FLIGHT = 2
_TEXT_ALIGNMENT = 64
_TENSOR_ALIGNMENT = 16
_CONTAINERS = (list, tuple, dict, OrderedDict, UserDict)
UNKNOWN = -1


class MessageKind(IntEnum):
    """What a message is."""

    BATCH = 0
    END = 1
    ERROR = 2
    RESIZE = 3


class MessageHeader(NamedTuple):
    """The fixed-size head of a message."""

    pass_number: int
    kind: int
    is_last: int = 0
    rows: int = UNKNOWN
    real: int = UNKNOWN
    samples: int = 0
    consumed: int = 0
    structure_bytes: int = 0
    other_bytes: int = 0
    capacity: int = 0


class StepMessage(NamedTuple):
    """A received step; of an error, `batch` is its pickled bytes."""

    header: MessageHeader
    batch: Any


def _align(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


class PackedBatch:
    """A batch taken apart: a comparable description, its tensors, and everything else pickled."""

    pickled_structure: bytes = b""

    def __init__(self, batch: Any) -> None:
        self.tensors: list[Tensor] = []
        self._others: list[Any] = []
        self.structure = self._describe(batch)
        self.others = pickle.dumps(self._others) if self._others else b""
        self.tensor_bytes = sum(_align(tensor.nbytes, _TENSOR_ALIGNMENT) for tensor in self.tensors)

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
            offset += _align(size, _TENSOR_ALIGNMENT)


class BatchUnpacker:
    """Put a batch together again; its tensors are views of the buffer."""

    def __init__(self, buffer: Tensor, offset: int, others: bytes) -> None:
        self._buffer = buffer
        self._offset = offset
        self._others = iter(pickle.loads(others) if others else ())

    def build(self, node: tuple[Any, ...]) -> Any:
        """Return the value that a description stands for."""
        match node:
            case ("tensor", dtype, shape):
                return self._tensor(dtype, shape)
            case ("mapping", kind, keys, *values):
                entries = dict(zip(keys, map(self.build, values), strict=True))
                return entries if kind is dict else kind(entries)
            case ("sequence", kind, *values):
                built = [self.build(value) for value in values]
                return kind(*built) if hasattr(kind, "_fields") else kind(built)
        return next(self._others)

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = dtype.itemsize
        for length in shape:
            size *= length
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        offset, self._offset = self._offset, self._offset + _align(size, _TENSOR_ALIGNMENT)
        return self._buffer[offset : offset + size].view(dtype).view(shape)


class _ChannelEnd:
    """What both ends share: a group of their own over host memory, a tag, and the number of the pass."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup = current.remember("dispatch_group", lambda: dist.new_group(backend="gloo"))
        # Loaders are first read in the same order on every process.
        self._tag: int = next(current.remember("dispatch_tags", lambda: itertools.count(1)))
        self.pass_number = 0

    def begin(self) -> None:
        """Start a pass."""
        self.pass_number += 1
        self._open_ends()[self._tag] = self

    def flush(self) -> None:
        """End a pass that was read to its end."""
        self._open_ends().pop(self._tag, None)

    @staticmethod
    def _open_ends() -> dict[int, _ChannelEnd]:
        """Return the ends with messages under way: their buffers must live, even if the loader is dropped meanwhile."""
        return current.remember("dispatch_open_ends", dict)


class _Receiver:
    """What the reader remembers of one receiver."""

    def __init__(self) -> None:
        self.capacity = _FIRST_CAPACITY
        self.structure: tuple[Any, ...] | None = None
        self.in_flight: deque[tuple[Any, Tensor]] = deque()


class SendingEnd(_ChannelEnd):
    """The reader's end of the channel to every other process."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._receivers = {rank: _Receiver() for rank in range(1, world_size)}
        self._last_structure: tuple[tuple[Any, ...], bytes] = ((), b"")

    def pack(self, batch: Any) -> PackedBatch:
        """Prepare a batch for `send`, which does not fail afterwards because of what the batch contains.

        Raises:
            Exception: If a value cannot be pickled; its type depends on the value.
        """
        try:
            packed = PackedBatch(batch)
            if packed.structure != self._last_structure[0]:
                self._last_structure = (packed.structure, pickle.dumps(packed.structure))
        except Exception as error:
            # Notes came with python 3.11.
            getattr(error, "add_note", id)(
                "rank 0 pickles the batches of a dispatched loader to send them to the other processes. Return tensors and "
                "plain values from the dataset and the collate function, or set dispatch_batches=False."
            )
            raise
        packed.pickled_structure = self._last_structure[1]
        return packed

    def flush(self) -> None:
        """Wait until everything is received."""
        for receiver in self._receivers.values():
            while receiver.in_flight:
                receiver.in_flight.popleft()[0].wait()
        super().flush()

    def send(self, rank: int, header: MessageHeader, packed: PackedBatch | None = None, error: bytes = b"") -> None:
        """Send a batch, or a pickled error, to one process."""
        receiver = self._receivers[rank]
        structure = b""
        others = error if packed is None else packed.others
        if packed is not None and packed.structure != receiver.structure:
            structure = packed.pickled_structure
            receiver.structure = packed.structure
        begin = _HEADER_BYTES + _align(len(structure) + len(others), _TEXT_ALIGNMENT)
        size = begin + (0 if packed is None else packed.tensor_bytes)
        if size > receiver.capacity or size * 4 < receiver.capacity > _FIRST_CAPACITY:
            capacity = max(_FIRST_CAPACITY, _align(size + size // 8, _TEXT_ALIGNMENT))
            resize = header._replace(kind=MessageKind.RESIZE, capacity=capacity)
            self._post(receiver, rank, self._frame(receiver, resize))
            receiver.capacity = capacity
        frame = self._frame(receiver, header._replace(structure_bytes=len(structure), other_bytes=len(others)))
        if structure or others:
            text = torch.frombuffer(bytearray(structure + others), dtype=torch.uint8)
            frame[_HEADER_BYTES : _HEADER_BYTES + len(text)] = text
        if packed is not None:
            packed.write(frame, begin)
        self._post(receiver, rank, frame)

    def _frame(self, receiver: _Receiver, header: MessageHeader) -> Tensor:
        frame = torch.empty(receiver.capacity, dtype=torch.uint8)
        frame[: len(header) * 8] = torch.tensor(header, dtype=torch.int64).view(torch.uint8)
        return frame

    def _post(self, receiver: _Receiver, rank: int, frame: Tensor) -> None:
        # The frame must live until it is sent; a receiver that is slow holds the reader back here.
        while len(receiver.in_flight) > _MAX_IN_FLIGHT:
            receiver.in_flight.popleft()[0].wait()
        receiver.in_flight.append((dist.isend(frame, rank, group=self._group, tag=self._tag), frame))


class ReceivingEnd(_ChannelEnd):
    """The end of a process that does not read."""

    def __init__(self) -> None:
        super().__init__()
        self._capacity = _FIRST_CAPACITY
        self._structure: tuple[Any, ...] | None = None
        self._posted: tuple[Any, Tensor] | None = None

    def post(self) -> None:
        """Open the buffer of the next message, so that it arrives while this process computes."""
        if self._posted is None:
            frame = torch.empty(self._capacity, dtype=torch.uint8)
            self._posted = (dist.irecv(frame, 0, group=self._group, tag=self._tag), frame)

    def receive(self) -> StepMessage:
        """Return the next message of this pass; what a pass that was left early did not take is thrown away.

        Raises:
            UsageError: If the reader has begun another pass.
        """
        while True:
            message = self._next_message()
            header = message.header
            if header.pass_number > self.pass_number:
                raise UsageError(
                    f"rank 0 began pass {header.pass_number} over a dispatched loader while this process waits for a batch "
                    f"of pass {self.pass_number}: the processes left the loop at different steps; let all leave it at the "
                    "same one, for example with `accelerator.check_trigger()`"
                )
            if header.pass_number == self.pass_number and header.kind != MessageKind.RESIZE:
                return message

    def _next_message(self) -> StepMessage:
        self.post()
        assert self._posted is not None
        work, frame = self._posted
        work.wait()
        self._posted = None
        header = MessageHeader(*frame[:_HEADER_BYTES].view(torch.int64).tolist()[: len(MessageHeader._fields)])
        if header.kind == MessageKind.RESIZE:
            self._capacity = header.capacity
            return StepMessage(header, None)
        length = header.structure_bytes + header.other_bytes
        text = frame[_HEADER_BYTES : _HEADER_BYTES + length].numpy().tobytes() if length else b""
        structure, others = text[: header.structure_bytes], text[header.structure_bytes :]
        if header.kind != MessageKind.BATCH:
            return StepMessage(header, others)
        if structure:
            self._structure = pickle.loads(structure)
        assert self._structure is not None
        offset = _HEADER_BYTES + _align(length, _TEXT_ALIGNMENT)
        return StepMessage(header, BatchUnpacker(frame, offset, others).build(self._structure))
