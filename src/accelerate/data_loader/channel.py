"""The wire between the process that reads and those that receive: one message a step, sent ahead of its use."""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate._base.errors import UsageError
from accelerate.data_loader.packing import Parcel, Unpacker
from accelerate.runtime import current

_FIELDS = 16
_HEADER_BYTES = _FIELDS * 8
_FIRST_CAPACITY = 1 << 12
_IN_FLIGHT = 2
UNKNOWN = -1


class Kind(IntEnum):
    """What a message is."""

    BATCH = 0
    END = 1
    ERROR = 2
    RESIZE = 3


class Header(NamedTuple):
    """The fixed-size head of a message."""

    pass_number: int
    kind: int
    is_last: int = 0
    rows: int = UNKNOWN
    real: int = UNKNOWN
    samples: int = 0
    consumed: int = 0
    base_seed: int = UNKNOWN
    structure_bytes: int = 0
    other_bytes: int = 0
    capacity: int = 0


class Message(NamedTuple):
    """A received step."""

    header: Header
    batch: Any


def wire() -> dist.ProcessGroup:
    """Return a group of its own for these messages, over host memory whatever the devices talk with."""
    group: dist.ProcessGroup = current.remember("dispatch_wire", lambda: dist.new_group(backend="gloo"))
    return group


def next_tag() -> int:
    """Return a tag that no other loader uses; loaders are first read in the same order on every process."""
    return next(current.remember("dispatch_tags", lambda: itertools.count(1)))


def _open_ends() -> dict[int, Any]:
    """Return the ends with messages under way: their buffers must live, even if the loader is dropped meanwhile."""
    return current.remember("dispatch_open_ends", dict)


class _Line:
    """What the reader remembers of one receiver."""

    def __init__(self) -> None:
        self.capacity = _FIRST_CAPACITY
        self.structure: tuple[Any, ...] | None = None
        self.in_flight: deque[tuple[Any, Tensor]] = deque()


class Sender:
    """The reader's end, with a line to every other process."""

    def __init__(self, world_size: int) -> None:
        self._group = wire()
        self._tag = next_tag()
        self._lines = {rank: _Line() for rank in range(1, world_size)}
        self.pass_number = 0

    def begin(self) -> None:
        """Start a pass."""
        self.pass_number += 1
        _open_ends()[self._tag] = self

    def flush(self) -> None:
        """Wait until everything is received."""
        for line in self._lines.values():
            while line.in_flight:
                line.in_flight.popleft()[0].wait()
        _open_ends().pop(self._tag, None)

    def send(self, rank: int, header: Header, parcel: Parcel | None = None, note: bytes = b"") -> None:
        """Send a batch, or a pickled note, to one process."""
        line = self._lines[rank]
        structure = b""
        others = note if parcel is None else parcel.others
        if parcel is not None and parcel.structure != line.structure:
            structure = pickle.dumps(parcel.structure)
            line.structure = parcel.structure
        begin = _HEADER_BYTES + _padded(len(structure) + len(others))
        size = begin + (0 if parcel is None else parcel.tensor_bytes)
        if size > line.capacity or size * 4 < line.capacity > _FIRST_CAPACITY:
            capacity = max(_FIRST_CAPACITY, _padded(size + size // 8))
            self._post(line, rank, self._frame(line, header._replace(kind=Kind.RESIZE, capacity=capacity)))
            line.capacity = capacity
        frame = self._frame(line, header._replace(structure_bytes=len(structure), other_bytes=len(others)))
        if structure or others:
            text = torch.frombuffer(bytearray(structure + others), dtype=torch.uint8)
            frame[_HEADER_BYTES : _HEADER_BYTES + len(text)] = text
        if parcel is not None:
            parcel.write(frame, begin)
        self._post(line, rank, frame)

    def _frame(self, line: _Line, header: Header) -> Tensor:
        frame = torch.empty(line.capacity, dtype=torch.uint8)
        frame[: len(header) * 8] = torch.tensor(header, dtype=torch.int64).view(torch.uint8)
        return frame

    def _post(self, line: _Line, rank: int, frame: Tensor) -> None:
        # The frame must live until it is sent; a receiver that is slow holds the reader back here.
        while len(line.in_flight) > _IN_FLIGHT:
            line.in_flight.popleft()[0].wait()
        line.in_flight.append((dist.isend(frame, rank, group=self._group, tag=self._tag), frame))


class Receiver:
    """The end of a process that does not read."""

    def __init__(self) -> None:
        self._group = wire()
        self._tag = next_tag()
        self._capacity = _FIRST_CAPACITY
        self._structure: tuple[Any, ...] | None = None
        self._posted: tuple[Any, Tensor] | None = None
        self.pass_number = 0

    def begin(self) -> None:
        """Start a pass."""
        self.pass_number += 1
        _open_ends()[self._tag] = self

    def flush(self) -> None:
        """End a pass that was received to its end."""
        _open_ends().pop(self._tag, None)

    def post(self) -> None:
        """Open the buffer of the next message, so that it arrives while this process computes."""
        if self._posted is None:
            frame = torch.empty(self._capacity, dtype=torch.uint8)
            self._posted = (dist.irecv(frame, 0, group=self._group, tag=self._tag), frame)

    def receive(self) -> Message:
        """Return the next message of this pass; what a pass that was left early did not take is thrown away.

        Raises:
            UsageError: If the reader has begun another pass.
        """
        while True:
            header, frame = self._next_frame()
            message = self._opened(header, frame)
            if header.pass_number > self.pass_number:
                raise UsageError(
                    f"rank 0 began pass {header.pass_number} over a dispatched loader while this process waits for a batch "
                    f"of pass {self.pass_number}: the processes left the loop at different steps; let all leave it at the "
                    "same one, for example with `accelerator.check_trigger()`"
                )
            if header.pass_number == self.pass_number and header.kind != Kind.RESIZE:
                return message

    def _next_frame(self) -> tuple[Header, Tensor]:
        self.post()
        assert self._posted is not None
        work, frame = self._posted
        work.wait()
        self._posted = None
        fields = frame[:_HEADER_BYTES].view(torch.int64).tolist()
        return Header(*fields[: len(Header._fields)]), frame

    def _opened(self, header: Header, frame: Tensor) -> Message:
        if header.kind == Kind.RESIZE:
            self._capacity = header.capacity
            return Message(header, None)
        text = b""
        if length := header.structure_bytes + header.other_bytes:
            text = frame[_HEADER_BYTES : _HEADER_BYTES + length].numpy().tobytes()
        structure, others = text[: header.structure_bytes], text[header.structure_bytes :]
        if header.kind != Kind.BATCH:
            return Message(header, others)
        if structure:
            self._structure = pickle.loads(structure)
        assert self._structure is not None
        offset = _HEADER_BYTES + _padded(length)
        return Message(header, Unpacker(frame, offset, others).build(self._structure))


def _padded(size: int) -> int:
    return -(-size // 64) * 64
