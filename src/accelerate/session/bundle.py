"""A typed view of the arguments of `prepare`, scanned once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate._base.errors import ConfigurationError


class Kind(Enum):
    """What an argument of `prepare` is."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "loader"
    OTHER = "other"


_TYPES: tuple[tuple[type, Kind], ...] = (
    (torch.nn.Module, Kind.MODEL),
    (torch.optim.Optimizer, Kind.OPTIMIZER),
    (LRScheduler, Kind.SCHEDULER),
    (DataLoader, Kind.LOADER),
)


@dataclass
class Slot:
    """One argument of `prepare`: what was given, and what goes back in its place."""

    given: Any
    kind: Kind
    device_placement: bool | None
    result: Any


class Bundle:
    """The arguments of one call of `prepare`, in order and by kind.

    Args:
        args: The objects to prepare.
        device_placement: A flag per object, or None to use the default for all.
        loader_classes: Further classes that count as loaders.

    Raises:
        ConfigurationError: If the flags do not match the objects, or an object was given twice.
    """

    def __init__(
        self,
        args: Sequence[Any],
        device_placement: Sequence[bool | None] | None = None,
        loader_classes: tuple[type, ...] = (),
    ) -> None:
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigurationError(
                f"device_placement={list(device_placement)!r} has {len(device_placement)} entries for {len(args)} "
                "objects. Give one entry per object: True, False, or None for the default."
            )
        placements = device_placement if device_placement is not None else [None] * len(args)
        self.slots = [
            Slot(given, _kind(given, loader_classes), placement, given)
            for given, placement in zip(args, placements, strict=True)
        ]
        seen: set[int] = set()
        for slot in self.slots:
            if slot.kind is Kind.OTHER:
                continue
            if id(slot.given) in seen:
                raise ConfigurationError(
                    f"The same {slot.kind.value} ({type(slot.given).__name__}) was given twice to prepare(): it would be "
                    "wrapped twice. Give each object once."
                )
            seen.add(id(slot.given))

    def of(self, *kinds: Kind) -> Iterator[Slot]:
        """Return the slots of the given kinds, in the order of the arguments."""
        return (slot for slot in self.slots if slot.kind in kinds)

    def results(self) -> Any:
        """Return what goes back to the caller: one object, or a tuple in the order of the arguments."""
        values = tuple(slot.result for slot in self.slots)
        return values[0] if len(values) == 1 else values


def _kind(value: object, loader_classes: tuple[type, ...]) -> Kind:
    if loader_classes and isinstance(value, loader_classes):
        return Kind.LOADER
    return next((kind for known, kind in _TYPES if isinstance(value, known)), Kind.OTHER)
