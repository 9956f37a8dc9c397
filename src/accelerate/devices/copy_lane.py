"""A way from host memory to an accelerator that does not stop the accelerator's own work."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch


@dataclass
class Arrival:
    """A tensor that is on its way to a device.

    Args:
        done: What the lane signals when it is there.
    """

    tensor: torch.Tensor
    done: torch.Event

    def take(self) -> torch.Tensor:
        """Return the tensor; work that the caller queues on the device from now on waits until it is there."""
        stream = torch.accelerator.current_stream(self.tensor.device)
        stream.wait_event(self.done)
        # The memory was taken by the lane: without this it could be given away before the caller's work is done.
        self.tensor.record_stream(stream)
        return self.tensor


@dataclass
class _Buffer:
    memory: torch.Tensor
    free: torch.Event | None = None


@dataclass
class CopyLane:
    """Copy tensors to a device on a stream of its own, through buffers in pinned memory.

    Two buffers let the host fill one while the device empties the other. Threads take turns.
    """

    device: torch.device
    num_buffers: int = 2
    _stream: torch.Stream | None = None
    _buffers: list[_Buffer] = field(default_factory=list)
    _next: int = 0
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def send(self, source: torch.Tensor, dtype: torch.dtype) -> Arrival:
        """Start to copy a tensor of the host, and convert it there."""
        with self._turn:
            return self._send(source, dtype)

    def _send(self, source: torch.Tensor, dtype: torch.dtype) -> Arrival:
        if self._stream is None:
            self._stream = torch.Stream(device=self.device)
        pinned, buffer = self._pinned(source)
        pinned.copy_(source)
        with self._stream:
            tensor = pinned.to(self.device, non_blocking=True).to(dtype)
            done = torch.Event(device=self.device)
            done.record(self._stream)
        buffer.free = done
        return Arrival(tensor, done)

    def _pinned(self, source: torch.Tensor) -> tuple[torch.Tensor, _Buffer]:
        if len(self._buffers) < self.num_buffers:
            self._buffers.append(_Buffer(torch.empty(0, dtype=torch.uint8)))
        self._next = (self._next + 1) % len(self._buffers)
        buffer = self._buffers[self._next]
        if buffer.free is not None:
            buffer.free.synchronize()
        if buffer.memory.nbytes < source.nbytes:
            buffer.memory = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        return buffer.memory[: source.nbytes].view(source.dtype).view(source.shape), buffer
