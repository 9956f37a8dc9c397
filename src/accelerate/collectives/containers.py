"""Take nested containers apart and put them together again, with their types preserved."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch


class Child(NamedTuple):
    """One entry of a container: how it is written after the container's name, and its value."""

    step: str
    value: Any


def is_namedtuple(data: Any) -> bool:
    """Return whether the value is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: Any) -> bool:
    """Return whether the value is an instance of a dataclass, not the class itself."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a list, tuple or named tuple of the type of `obj` from the values."""
    values = list(generator)
    if is_namedtuple(obj):
        return type(obj)(*values)
    if isinstance(obj, torch.Size) and not all(isinstance(value, int) for value in values):
        return tuple(values)
    return type(obj)(values)


def children(data: Any) -> list[Child] | None:
    """Return the entries of a container, or None for a value that is not one.

    Containers are lists, tuples, named tuples, mappings and dataclass instances.
    """
    if isinstance(data, Mapping):
        return [Child(f"[{key!r}]", value) for key, value in data.items()]
    if is_namedtuple(data):
        return [Child(f".{name}", value) for name, value in zip(data._fields, data, strict=True)]
    if isinstance(data, (list, tuple)):
        return [Child(f"[{index}]", value) for index, value in enumerate(data)]
    if is_dataclass_instance(data):
        return [Child(f".{name}", getattr(data, name)) for name in _field_names(data)]
    return None


def rebuilt(data: Any, values: list[Any]) -> Any:
    """Return a container like `data` that holds the values, given in the order of `children`."""
    if isinstance(data, (list, tuple)):
        return honor_type(data, values)
    if isinstance(data, Mapping):
        return _rebuilt_mapping(data, dict(zip(data, values, strict=True)))
    names = _field_names(data)
    if all(getattr(data, name) is value for name, value in zip(names, values, strict=True)):
        return data
    result = copy.copy(data)
    for name, value in zip(names, values, strict=True):
        # Frozen dataclasses forbid assignment on themselves, and `replace` would run __post_init__ a second time.
        object.__setattr__(result, name, value)
    return result


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a container, with its path such as `['scores'][0]`."""
    entries = children(data)
    if entries is None:
        yield path, data
        return
    for step, value in entries:
        yield from leaves(value, path + step)


def _field_names(data: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]


def _rebuilt_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return items
    if isinstance(data, MutableMapping):
        # A copy keeps what a constructor would lose: BatchEncoding's encodings, a defaultdict's factory.
        try:
            result = copy.copy(data)
            for key, value in items.items():
                result[key] = value
            return result
        except (TypeError, ValueError, AttributeError, NotImplementedError):
            pass
    return type(data)(items)  # type: ignore[call-arg]
