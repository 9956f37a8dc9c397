"""The size of the largest layer that a plan has still to place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import nn

from accelerate.offload.places import lookup
from accelerate.offload.sizes import is_splittable
from accelerate.offload.tree import children_of, own_buffers, own_parameters


class Reserve:
    """Tell the size of the largest layer behind a module, without going through the layers again.

    The layers are listed once in the order of the model, so that a module covers a range of them. Over the list stands a
    tree of maxima, each over two below it: an answer, and a layer taken out, cost the height of that tree.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int], no_split: set[str]) -> None:
        self._layers: list[int] = []
        self._starts: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._add_parts("", model, sizes, no_split)
        self._count = len(self._layers)
        self._maxima = [0] * self._count + self._layers
        for node in range(self._count - 1, 0, -1):
            self._maxima[node] = max(self._maxima[2 * node], self._maxima[2 * node + 1])

    def _add_parts(self, prefix: str, module: nn.Module, sizes: Mapping[str, int], no_split: set[str]) -> None:
        """Add what a module is made of, in the order of `parts_of`."""
        layers, ends = self._layers, self._ends
        parts: Iterable[tuple[str, nn.Module | torch.Tensor]]
        parts = chain(own_parameters(module), children_of(module), own_buffers(module))
        for key, part in parts:
            name = prefix + key
            if isinstance(part, nn.Module) and is_splittable(part, no_split):
                self._starts[name] = len(layers)
                self._add_parts(f"{name}.", part, sizes, no_split)
            else:
                layers.append(sizes.get(name, 0))
            ends[name] = len(layers)

    def largest_after(self, name: str) -> int:
        """Return the size of the largest layer that comes after a module and was not taken out."""
        end = self._ends.get(name)
        if end is None:
            end = lookup(self._ends, name)
        if end is None:
            return 0
        largest, low, high = 0, end + self._count, 2 * self._count
        while low < high:
            if low % 2:
                largest = max(largest, self._maxima[low])
                low += 1
            if high % 2:
                high -= 1
                largest = max(largest, self._maxima[high])
            low, high = low // 2, high // 2
        return largest

    def take_out(self, name: str) -> None:
        """Forget the layers of a module that was placed before its turn."""
        end = self._ends.get(name, 0)
        for layer in range(self._starts.get(name, end - 1), end):
            node = layer + self._count
            self._maxima[node] = 0
            while node > 1:
                node //= 2
                self._maxima[node] = max(self._maxima[2 * node], self._maxima[2 * node + 1])
