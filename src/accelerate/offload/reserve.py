"""The size of the largest layer that a plan has still to place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .places import prefixes
from .sizes import NamedParts, is_splittable, parts_of


class Reserve:
    """Tell the size of the largest layer behind a module, without going through the layers again.

    The layers are listed once in the order of the model, so that a module covers a range of them, and the answer is
    the largest size behind the end of that range.
    """

    def __init__(self, parts: NamedParts, sizes: Mapping[str, int], no_split: set[str]) -> None:
        self._sizes: list[int] = []
        self._ranges: dict[str, tuple[int, int]] = {}
        for name, part in parts:
            self._add(name, part, sizes, no_split)
        self._largest = self._running_maximum()

    def _add(self, name: str, part: nn.Module | torch.Tensor, sizes: Mapping[str, int], no_split: set[str]) -> None:
        start = len(self._sizes)
        if is_splittable(part, no_split):
            for key, child in parts_of(part, name):
                self._add(key, child, sizes, no_split)
        else:
            self._sizes.append(sizes.get(name, 0))
        self._ranges[name] = (start, len(self._sizes))

    def _running_maximum(self) -> list[int]:
        largest = [0]
        for size in reversed(self._sizes):
            largest.append(max(size, largest[-1]))
        return largest[::-1]

    def largest_after(self, name: str) -> int:
        """Return the size of the largest layer that comes after a module and was not taken out."""
        known = next((prefix for prefix in prefixes(name) if prefix in self._ranges), None)
        return 0 if known is None else self._largest[self._ranges[known][1]]

    def take_out(self, name: str) -> None:
        """Forget the layers of a module that was placed before its turn."""
        start, end = self._ranges.get(name, (0, 0))
        self._sizes[start:end] = [0] * (end - start)
        self._largest = self._running_maximum()
