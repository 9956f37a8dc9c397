"""The facts of this process, and the one home of mutable global state: the dictionaries behind the public state objects."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.devices.base import DeviceBackend

T = TypeVar("T")

PARTIAL: dict[str, Any] = {}
"""What every `PartialState` shows; empty means that nothing was started."""
ACCELERATOR: dict[str, Any] = {}
"""What every `AcceleratorState` shows."""
GRADIENT: dict[str, Any] = {}
"""What every `GradientState` shows."""
RENDEZVOUS: dict[str, Any] = {}
"""Where this process met the others; it outlives a reset, because they meet there again."""
CLAIMS: dict[str, Any] = {}
"""What this process has claimed on disks; it outlives a reset, because other processes see it."""
STAGES: set[Path] = set()
"""The folders that this process is writing to."""
WATCHED: dict[Path, tuple[Any, float]] = {}
"""How files that others may be writing looked, and since when they have looked like that."""
PREFETCH_THREADS: WeakSet[Any] = WeakSet()
"""The threads that load offloaded weights; each has a lock `busy` that it holds while it refers to some."""

_RUNTIME = "_runtime"
_MAIN_RANK = "_main_rank"
_SLOTS = "_slots"
_NUMBERS = "_numbers"
_MADE_AT = "_made_at"
_PACKAGE_FOLDER = str(Path(__file__).parents[1])
_CELL_MARKS = ("ipykernel_", "<ipython-input")


@dataclass(frozen=True)
class Topology:
    """Rank and size of the run and of this machine's part of it.

    Args:
        source: What gave the ranks ("torchrun", "Open MPI", ...), for messages.
        init_method: Where the processes meet (rendezvous), if not through the environment.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    source: str = "none"
    init_method: str | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world_size and self.local_rank >= 0):
            raise ConfigurationError(
                f"{self.source} gave rank {self.rank!r}, world size {self.world_size!r} and local rank "
                f"{self.local_rank!r}: a rank must lie between 0 and the world size. "
                "Check the variables of the launcher, or start with `accelerate launch` or `torchrun`."
            )


@dataclass(frozen=True, kw_only=True)
class Runtime(Topology):
    """What a process knows of itself once it has started; it never changes.

    Args:
        group_backend: The backend of the process group, None when the process is alone.
        reason: Why this device was chosen.
    """

    device: torch.device
    backend: DeviceBackend
    group_backend: str | None
    reason: str
    is_distributed: bool = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "is_distributed", self.world_size > 1)

    @property
    def checked(self) -> bool:
        """Whether collectives compare their arguments across ranks first: a program may switch it by `state.debug`."""
        return bool(PARTIAL.get("debug", False))


def active() -> Runtime | None:
    """Return the runtime of this process, or None if none was started."""
    return PARTIAL.get(_RUNTIME)


def runtime() -> Runtime:
    """Return the runtime of this process, and start it with defaults if there is none."""
    found: Runtime | None = PARTIAL.get(_RUNTIME)
    if found is None:
        from accelerate.runtime.start import (
            start,  # a start fills this module's dictionaries, so it imports this module
        )

        found = start()
    return found


def install(started: Runtime, **facts: Any) -> None:
    """Make `started` the runtime of this process and publish its facts to the state objects."""
    PARTIAL.update(facts)
    PARTIAL[_RUNTIME] = started
    PARTIAL[_SLOTS] = {}
    PARTIAL[_MADE_AT] = _running_cell()


def main_rank() -> int:
    """Return the rank that prints, logs and saves for all: the first one, unless the strategy of the run says another."""
    rank: int = PARTIAL.get(_MAIN_RANK, 0)
    return rank


def set_main_rank(rank: int) -> None:
    """Say which rank prints, logs and saves for all."""
    PARTIAL[_MAIN_RANK] = rank


def made_at() -> str | None:
    """Return the line that started this process, where that is known: in an interactive kernel."""
    place: str | None = PARTIAL.get(_MADE_AT)
    return place


def remember(key: str, factory: Callable[[], T]) -> T:
    """Return the object under `key`, made on first use and forgotten with the runtime."""
    runtime()
    slots = PARTIAL[_SLOTS]
    if key not in slots:
        slots[key] = factory()
    value: T = slots[key]
    return value


def forget(key: str) -> None:
    """Drop the object under `key`, so that it is made anew."""
    PARTIAL.get(_SLOTS, {}).pop(key, None)


def next_number(name: str) -> int:
    """Return 1, 2, ... at each call for this name, the same on all ranks that call it equally often."""
    runtime()  # a number in an empty dictionary would look like a started process
    numbers = PARTIAL.setdefault(_NUMBERS, {})
    numbers[name] = numbers.get(name, 0) + 1
    number: int = numbers[name]
    return number


def forget_all() -> None:
    """Drop all remembered objects."""
    PARTIAL.get(_SLOTS, {}).clear()


def reset() -> None:
    """Forget everything, as if nothing had been started; process groups are left alone."""
    for shared in (PARTIAL, ACCELERATOR, GRADIENT):
        shared.clear()


def _running_cell() -> str | None:
    """Return the running line of a cell; None outside an interactive kernel, where nobody asks for it."""
    if "ipykernel" not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    through = ""
    while frame is not None:
        place = frame.f_code.co_filename
        if any(mark in place for mark in _CELL_MARKS):
            source = linecache.getline(place, frame.f_lineno).strip()
            return f"line {frame.f_lineno} of a cell, `{source}`{through}"
        if not through and not place.startswith(_PACKAGE_FOLDER):
            through = f" (through {Path(place).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return None
