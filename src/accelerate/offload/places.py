"""Places: where the tensors of a model are kept, and the device map that gives each module its place."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeAlias, TypeVar

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import number_in
from accelerate.devices import registry

logger = logging.getLogger("accelerate.utils.modeling")  # programs filter this name

Place: TypeAlias = int | str | torch.device
"""A device index, a device, `"cpu"` or `"disk"`."""

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
    if place == DISK:
        raise ConfigurationError(
            f"A tensor cannot be computed with on {place!r}: it is a place to store weights, not a device. "
            "Name the device that runs the module, and let `dispatch_model` or `disk_offload` fetch the weights."
        )
    if isinstance(place, str):
        index = number_in(place)
        return torch.device(place if index is None else index)
    backend = registry.default().value
    if backend.type == HOST:
        raise ConfigurationError(
            f"Device {place!r} names an accelerator, and this host has none ({registry.default().reason}). "
            'Write "cpu", or "disk" for weights that do not fit in memory.'
        )
    return backend.device(place)


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


def clean_device_map(device_map: Mapping[str, Place], module_name: str = "") -> dict[str, Place]:
    """Shorten a map, in place where it is a dictionary, to one entry for every sub-tree that lies on one device.

    Args:
        module_name: Shorten only what lies at or below this module.
    """
    first: dict[str, Place] = {}
    several: set[str] = set()
    mixed: set[str] = set()
    for name, place in device_map.items():
        for prefix in prefixes(name) if name else [""]:
            if prefix not in first:
                first[prefix] = place
                continue
            several.add(prefix)
            if first[prefix] != place:
                mixed.add(prefix)
    uniform = several - mixed
    if not uniform and isinstance(device_map, dict):
        return device_map
    shortened: dict[str, Place] = {}
    for name, place in device_map.items():
        inside = [prefix for prefix in prefixes(name) if not module_name or f"{prefix}.".startswith(f"{module_name}.")]
        highest = next((prefix for prefix in reversed(inside) if prefix in uniform), name)
        shortened[highest] = place
    if not isinstance(device_map, dict):
        return shortened
    device_map.clear()
    device_map.update(shortened)
    return device_map


def flatten_device_map(model: nn.Module, device_map: Mapping[str, Place]) -> dict[str, Place]:
    """Return the map with no entry below another one: a module with such an entry is written as its parts.

    The nearest entry decides, so `{"": "cpu", "embed": "disk"}` is the CPU for everything but `embed`.
    """
    opened = {above for name in device_map if name for above in prefixes(name)[1:]}
    found = {name: place for name, place in device_map.items() if name not in opened}
    pending = [(name, device_map[name]) for name in device_map if name in opened]
    modules = dict(model.named_modules(remove_duplicate=False)) if pending else {}
    while pending:
        name, place = pending.pop()
        module = modules.get(name)
        if module is None:
            continue
        for key, held in chain(module._parameters.items(), module.named_children(), module._buffers.items()):
            part = f"{name}.{key}" if name else key
            if held is None or part in device_map:
                continue
            if part in opened:
                pending.append((part, place))
            else:
                found[part] = place
    return found


def check_device_map(model: nn.Module, device_map: Mapping[str, Place]) -> None:
    """Check that a device map gives every tensor of the state dict a place.

    Raises:
        ConfigurationError: If a tensor has none.
    """
    tensors = dict.fromkeys(model.state_dict())
    missing = [name for name in tensors if lookup(device_map, name) is None]
    if missing:
        raise ConfigurationError(
            f"The device map {dict(device_map)!r} gives no device for {', '.join(missing)}: a tensor without a place "
            'cannot be loaded. Add their modules to the map, or an entry "" for everything that is left.'
        )
    known = {name for name, _ in model.named_modules(remove_duplicate=False)} | tensors.keys()
    known |= {name for name, _ in model.named_buffers()}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(
            f"The keys {unknown!r} of the device map name no module of {type(model).__name__}, so they place nothing.",
            stacklevel=2,
        )


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Place]) -> None:
    """Log a warning about tied parameters that a device map puts on different devices."""
    for group in tied_params:
        places = {name: lookup(device_map, name) for name in group}
        if len(set(places.values())) > 1:
            logger.warning(
                "Tied parameters lie on different devices: %r. They will not be one tensor any more; give their modules "
                "one device to keep them tied.",
                places,
            )
