"""The words by which a weight's place is named: a device index, a device, `"cpu"` or `"disk"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.devices import registry

Place: TypeAlias = int | str | torch.device
MemoryMap: TypeAlias = dict[int | str, int | str]

HOST = "cpu"
DISK = "disk"
META = torch.device("meta")

T = TypeVar("T")


def as_device(place: Place) -> torch.device:
    """Return the torch device that a place names; an integer counts the accelerators of this host.

    Raises:
        ConfigurationError: If the place is `"disk"`, or an index on a host without an accelerator.
    """
    if isinstance(place, torch.device):
        return place
    if isinstance(place, int):
        return _accelerator(place)
    if place == DISK:
        raise ConfigurationError(
            f"A tensor cannot be computed with on {place!r}: it is a place to store weights, not a device. "
            "Name the device that runs the module, and let `dispatch_model` or `disk_offload` fetch the weights."
        )
    return torch.device(int(place) if place.isdecimal() else place)


def _accelerator(index: int) -> torch.device:
    backend = registry.default().value
    if backend.type == HOST:
        raise ConfigurationError(
            f"Device {index!r} names an accelerator, and this host has none ({registry.default().reason}). "
            'Write "cpu", or "disk" for weights that do not fit in memory.'
        )
    return backend.device(index)


def is_offload(place: Place) -> bool:
    """Return whether a place holds weights but is not an accelerator: `"cpu"` or `"disk"`."""
    return str(place) in (HOST, DISK)


def prefixes(name: str) -> list[str]:
    """Return a dotted name and all modules above it, the nearest first and the root `""` last."""
    found = [name]
    while "." in name:
        name = name.rpartition(".")[0]
        found.append(name)
    found.append("")
    return found


def lookup(table: Mapping[str, T], name: str) -> T | None:
    """Return the entry of the nearest module at or above `name`."""
    while name not in table:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return table[name]
