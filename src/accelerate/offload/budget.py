"""How much memory the weights of offloaded modules may take while a model runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerate._base.helpers import Choice
from accelerate._base.imports import require
from accelerate.offload.memory import free_memory_of
from accelerate.offload.places import HOST
from accelerate.offload.sizes import convert_file_size_to_int

MAPPED_SHARE = 2
"""One in so many bytes of the free memory may hold pages of weight files, which the system can always take back."""
COPIED_SHARE = 64
"""One in so many bytes of the free memory may hold copies of weights, which nobody else can use."""
DEVICE_SHARE = 8
"""The same on an accelerator, where nothing else of an offloaded model lies."""


@dataclass(frozen=True)
class Budget:
    """The bytes of weights that may be in memory at a time.

    Args:
        mapped: Pages of files; they count as cache of the system, not as memory of the process.
        copied: Copies: weights on an accelerator, or in another dtype than they are stored in.
    """

    mapped: int
    copied: int


def choose_budget(offload_memory: int | str | None, device: torch.device, largest: int) -> Choice[Budget]:
    """Return the memory that weights may take on their way to a device.

    Args:
        offload_memory: Bytes or text like `"2GB"`, as the user wants it; measured if not given.
        largest: The bytes of the largest module. A module that runs and the one that comes next always have room.
    """
    floor = 2 * largest
    if offload_memory is not None:
        limit = convert_file_size_to_int(offload_memory)
        return Choice(Budget(max(limit, floor), max(limit, floor)), f"offload_memory={offload_memory!r}")
    free: int = require("psutil", why="To see how much memory is free").virtual_memory().available
    copied = free // COPIED_SHARE
    if device.type != HOST:
        copied = free_memory_of(device, free) // DEVICE_SHARE
    budget = Budget(mapped=max(free // MAPPED_SHARE, floor), copied=max(copied, floor))
    return Choice(budget, f"{free} bytes of memory are free")
