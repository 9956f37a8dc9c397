"""One offloaded weight on its way into memory and out of it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from accelerate.devices import registry
from accelerate.devices.copy_lane import Arrival, CopyLane
from accelerate.offload import advice
from accelerate.offload.mapped import FoundWeight, memory_for
from accelerate.offload.places import HOST

_NEVER = 1 << 60
_NOT_KNOWN = 1 << 50


class Where(Enum):
    """How far a weight has come."""

    AWAY = auto()
    ASKED = auto()
    COMING = auto()
    HERE = auto()


@dataclass(eq=False)
class TravellingWeight:
    """A weight that is fetched before a module runs and may be given up after.

    Times are counted in modules that have run.

    Args:
        found: Where it is stored.
        device: Where it is used.
        dtype: What it is used as.
    """

    found: FoundWeight
    device: torch.device
    dtype: torch.dtype
    where: Where = Where.AWAY
    users: int = 0
    kept: bool = False
    used_at: int = -1
    interval: int | None = None
    expected_at: int = -1
    _content: torch.Tensor | Arrival | None = None
    _version: int = 0
    _lane: CopyLane | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        direct = self.device.type == HOST and self.found.tensor.dtype == self.dtype == self.found.dtype
        self.is_held = direct and self.found.file is None
        self.in_place = direct and self.found.in_place
        self.nbytes = self.found.tensor.numel() * self.dtype.itemsize
        if self.is_held or self.in_place:
            self._content = self.found.tensor
            self._version = self.found.tensor._version
        if self.is_held:
            self.where = Where.HERE

    def start_lane(self, lanes: dict[torch.device, CopyLane | None]) -> None:
        """Use the lane to the weight's device, made at the first call for each device."""
        if self.device.type != HOST and self.device not in lanes:
            lanes[self.device] = registry.get(self.device).copy_lane(self.device)
        self._lane = lanes.get(self.device)

    def use(self, clock: int) -> None:
        """Note that a module that needs it runs now."""
        if self.used_at >= 0 and clock > self.used_at:
            self.interval = clock - self.used_at
        self.used_at = clock
        self.users += 1

    def next_use(self, clock: int, slack: int) -> int:
        """Return when it is expected to be used next; of those that were used once, the last one is the furthest away.

        Args:
            slack: How long after the expected time it may still be used.
        """
        if self.expected_at >= clock:
            return self.expected_at
        if self.interval is None:
            return _NOT_KNOWN + self.used_at
        due = self.used_at + self.interval
        return due if due >= clock - slack else _NEVER

    def fetch(self) -> None:
        """Bring the weight into memory, and return when it is there or, on an accelerator, on its way."""
        if self.found.file is not None:
            self.found.file.check()
        if self.in_place:
            advice.bring(self.found.tensor)
            return
        with torch.inference_mode(False), torch.no_grad():
            source = self.found.tensor
            if self.found.dtype not in (source.dtype, self.dtype):
                source = source.to(self.found.dtype)
            if self._lane is not None:
                self._content = self._lane.send(source, self.dtype)
                self._version = self._content.tensor._version
                return
            if self.device.type == HOST:
                self._content = memory_for(source.shape, self.dtype).copy_(source)
            else:
                self._content = source.to(self.device, self.dtype)
            self._version = self._content._version

    def take(self) -> torch.Tensor:
        """Return the weight, which has been fetched or needs no fetching."""
        if isinstance(self._content, Arrival):
            return self._content.take()
        assert self._content is not None
        return self._content

    def was_changed(self) -> bool:
        """Return whether somebody wrote to the weight since it was fetched."""
        content = self._content.tensor if isinstance(self._content, Arrival) else self._content
        return content is not None and content._version != self._version

    def give_up(self) -> None:
        """Let go of the memory; the next `fetch` brings the weight again."""
        if self.in_place and self.found.file is not None:
            advice.let_go(self.found.tensor, self.found.file.path, self.found.offset)
        else:
            self._content = None
        self.where = Where.AWAY
        self.expected_at = -1
