"""The parts inside a `DataLoader`: finding its samplers, and copying it with some of them exchanged."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accelerate._base.imports import require

_PYTORCH_DATALOADER_KWARGS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name not in ("self", "dataset")
}
"""The arguments of `DataLoader` and their defaults."""

_FOR_WORKERS = ("prefetch_factor", "persistent_workers", "timeout")


def uses_batch_sampler_as_sampler(loader: Any) -> bool:
    """Return whether a batch sampler was given as `sampler=`, for datasets that are indexed by lists."""
    return isinstance(getattr(loader, "sampler", None), BatchSampler)


def outer_batch_sampler(loader: Any) -> Any:
    """Return the batch sampler of a loader, wherever it was given."""
    return loader.sampler if uses_batch_sampler_as_sampler(loader) else getattr(loader, "batch_sampler", None)


def nested_samplers(loader: Any) -> Iterator[Any]:
    """Yield the batch samplers and samplers of a loader, from the outside in, each once."""
    seen: set[int] = set()
    waiting = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while waiting:
        part = waiting.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        waiting += [getattr(part, "batch_sampler", None), getattr(part, "sampler", None)]


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler inside the batch sampler of a loader, None if it has none."""
    part = outer_batch_sampler(dataloader)
    while (inner := getattr(part, "batch_sampler", None)) is not None:
        part = inner
    return getattr(part, "sampler", None)


def set_sampler(dataloader: Any, sampler: Any) -> None:
    """Replace the sampler inside the batch sampler of a loader."""
    part = outer_batch_sampler(dataloader)
    while (inner := getattr(part, "batch_sampler", None)) is not None:
        part = inner
    if part is not None:
        part.sampler = sampler


def copy_part(part: Any, **changes: Any) -> Any:
    """Return a shallow copy of an object with some attributes exchanged, whatever its class does on assignment."""
    twin = object.__new__(type(part))
    twin.__dict__.update(part.__dict__)
    twin.__dict__.update(changes)
    return twin


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return the same loader (class, options, workers' settings) with some parts exchanged.

    `DataLoader` forbids to assign its parts once it is built, because its options depend on each other: the caller sees
    to it that they fit.
    """
    twin: DataLoader[Any] = copy_part(loader, _iterator=None, **changes)
    return twin


def stateful_class() -> type[Any]:
    """Return torchdata's loader that can save its state.

    Raises:
        MissingPackageError: (an ImportError) if torchdata is not installed.
    """
    require("torchdata", why="use_stateful_dataloader=True saves the state of a loader with it")
    from torchdata.stateful_dataloader import StatefulDataLoader

    found: type[Any] = StatefulDataLoader
    return found


def as_stateful(loader: Any) -> Any:
    """Return torchdata's stateful loader with the options of `loader`."""
    cls = stateful_class()
    if isinstance(loader, cls):
        return loader
    accepted = inspect.signature(cls.__init__).parameters
    kwargs = {
        name: getattr(loader, name)
        for name in _PYTORCH_DATALOADER_KWARGS
        if name in accepted and name not in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
    }
    if loader.num_workers == 0:
        kwargs = {name: value for name, value in kwargs.items() if name not in _FOR_WORKERS}
    stateful = cls(loader.dataset, **kwargs)
    for name in ("batch_sampler", "sampler", "batch_size", "drop_last"):
        stateful.__dict__[name] = loader.__dict__[name]
    return stateful
