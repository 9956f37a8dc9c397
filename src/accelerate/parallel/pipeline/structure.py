"""Nested inputs and outputs taken apart into tensors and a pattern that puts them together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.collectives.containers import leaves
from accelerate.collectives.nested import recursively_apply

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


class Slot:
    """The place of a tensor in a pattern; not a dataclass, which would be taken for a container."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"<{self.index}>"


@dataclass(frozen=True)
class Pattern:
    """A structure with slots in the places of its tensors."""

    data: Any

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Return the structure with the tensors in their places."""
        return recursively_apply(
            lambda slot: tensors[slot.index], self.data, test_type=lambda value: isinstance(value, Slot)
        )


def take_apart(data: Any, what: str) -> tuple[list[torch.Tensor], Pattern]:
    """Return the tensors of a structure, and its pattern.

    Args:
        what: What the structure is, for the error.

    Raises:
        ConfigurationError: If it holds objects that are neither tensors nor plain values.
    """
    for path, leaf in leaves(data):
        if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
            raise ConfigurationError(
                f"{what}{path} is a {type(leaf).__name__}, which cannot travel between the stages of a pipeline: they "
                "exchange tensors, and plain values that never change. Leave it out; a cache of a Transformers model "
                "is left out by use_cache=False."
            )
    tensors: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    return tensors, Pattern(recursively_apply(put, data))
