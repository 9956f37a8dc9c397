"""The table from module names to devices: checked, and written as short as possible."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.offload.places import Place, lookup, prefixes
from accelerate.offload.sizes import parts_of


def clean_device_map(device_map: Mapping[str, Place], module_name: str = "") -> dict[str, Place]:
    """Return the map with one entry for every sub-tree that lies on one device.

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
    if not uniform:
        return dict(device_map)
    shortened: dict[str, Place] = {}
    for name, place in device_map.items():
        shortened[_shortest(name, uniform, module_name)] = place
    return shortened


def _shortest(name: str, uniform: set[str], module_name: str) -> str:
    """Return the highest module of `uniform` above `name` and not above `module_name`, or `name` itself."""
    inside = [prefix for prefix in prefixes(name) if not module_name or f"{prefix}.".startswith(f"{module_name}.")]
    return next((prefix for prefix in reversed(inside) if prefix in uniform), name)


def without_overlap(model: nn.Module, device_map: Mapping[str, Place]) -> dict[str, Place]:
    """Return the map with no entry below another one: a module with such an entry is written as its parts.

    The nearest entry decides, so `{"": "cpu", "embed": "disk"}` is the CPU for everything but `embed`.
    """
    opened = {above for name in device_map if name for above in prefixes(name)[1:]}
    found = {name: place for name, place in device_map.items() if name not in opened}
    pending = [(name, device_map[name]) for name in device_map if name in opened]
    modules = dict(model.named_modules(remove_duplicate=False)) if pending else {}
    while pending:
        name, place = pending.pop()
        for part, _ in parts_of(modules[name], name) if name in modules else ():
            if part in device_map:
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
    known = {name for name, _ in model.named_modules()} | tensors.keys()
    known |= {name for name, _ in model.named_buffers()}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(
            f"The keys {unknown!r} of the device map name no module of {type(model).__name__}, so they place nothing.",
            stacklevel=2,
        )


def check_tied_parameters_on_same_device(tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Place]) -> None:
    """Warn about tied parameters that a device map puts on different devices."""
    for group in tied_params:
        places = {name: lookup(device_map, name) for name in group}
        if len(set(places.values())) > 1:
            warnings.warn(
                f"Tied parameters lie on different devices: {places!r}. They will not be one tensor any more; "
                "give their modules one device to keep them tied.",
                stacklevel=2,
            )
