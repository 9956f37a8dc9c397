"""Every kind of sampler that a plain loop may have: torch's, and those of users that draw wherever they like."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

Draw = Callable[[int], int]
"""Draws a number below the given one."""

SOURCES: dict[str, Callable[[], Any]] = {
    "python": lambda: random.randrange,
    "numpy": lambda: np.random.randint,
    "torch": lambda: _from_torch(None),
    "own python": lambda: random.Random(5),
    "own numpy": lambda: np.random.default_rng(5),
    "own old numpy": lambda: np.random.RandomState(5),
    "own torch": lambda: torch.Generator().manual_seed(5),
}
"""Where a sampler of the user draws from: a global stream, or a generator that it keeps."""


def _from_torch(generator: torch.Generator | None) -> Draw:
    return lambda below: int(torch.randint(below, (), generator=generator))


def drawing(source: Any) -> Draw:
    """Return what draws from a source."""
    kinds: dict[type, Callable[[Any], Draw]] = {
        random.Random: lambda generator: generator.randrange,
        np.random.Generator: lambda generator: lambda below: int(generator.integers(below)),
        np.random.RandomState: lambda generator: generator.randint,
        torch.Generator: _from_torch,
    }
    return kinds[type(source)](source) if type(source) in kinds else source


class Shuffled(Sampler[int]):
    """A sampler of a user: a permutation drawn when it is opened, with the first index, or one index at a time."""

    def __init__(self, size: int, source: str, when: str) -> None:
        self.size = size
        self.generator_of_mine = SOURCES[source]()
        self.when = when

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        indices = self.one_at_a_time()
        if self.when == "opened":
            return iter(list(indices))
        return indices if self.when == "one at a time" else self.at_the_first(indices)

    def at_the_first(self, indices: Iterable[int]) -> Iterator[int]:
        yield from list(indices)

    def one_at_a_time(self) -> Iterator[int]:
        draw = drawing(self.generator_of_mine)
        left = list(range(self.size))
        while left:
            yield left.pop(int(draw(len(left))))


class Uncounted(Shuffled):
    """A sampler that does not say how many indices it gives."""

    def __len__(self) -> int:
        raise TypeError("nobody knows")


class VaryingBatches(Sampler[list[int]]):
    """A batch sampler of a user: batches of one to three samples, drawn as they come."""

    def __init__(self, size: int, source: str, when: str) -> None:
        self.indices = Shuffled(size, source, when)

    def __len__(self) -> int:
        return len(list(self.cut(iter(range(self.indices.size)))))

    def __iter__(self) -> Iterator[list[int]]:
        return self.cut(iter(self.indices))

    def cut(self, indices: Iterator[int]) -> Iterator[list[int]]:
        number = 0
        while batch := list(islice(indices, number % 3 + 1)):
            yield batch
            number += 1


def _torch_samplers() -> dict[str, Callable[[int], dict[str, Any]]]:
    generator = torch.Generator
    return {
        "sequential": lambda size: {},
        "shuffle": lambda size: {"shuffle": True},
        "shuffle, generator": lambda size: {"shuffle": True, "generator": generator().manual_seed(3)},
        "random, generator": lambda size: {"sampler": RandomSampler(range(size), generator=generator().manual_seed(3))},
        "replacement": lambda size: {"sampler": RandomSampler(range(size), replacement=True, num_samples=40)},
        "replacement, generator": lambda size: {
            "sampler": RandomSampler(range(size), True, 40, generator=generator().manual_seed(3))
        },
        "twice": lambda size: {"sampler": RandomSampler(range(size), num_samples=2 * size)},
        "twice, generator": lambda size: {
            "sampler": RandomSampler(range(size), num_samples=2 * size, generator=generator().manual_seed(3))
        },
        "subset": lambda size: {"sampler": SubsetRandomSampler(range(0, size, 2))},
        "subset, generator": lambda size: {
            "sampler": SubsetRandomSampler(range(0, size, 2), generator().manual_seed(3))
        },
        "weighted": lambda size: {"sampler": WeightedRandomSampler([1.0 + index for index in range(size)], size)},
        "weighted, generator": lambda size: {
            "sampler": WeightedRandomSampler([1.0] * size, size, False, generator().manual_seed(3))
        },
        "batch sampler": lambda size: {"batch_sampler": BatchSampler(RandomSampler(range(size)), 3, drop_last=True)},
        "no batches": lambda size: {"batch_size": None, "shuffle": True},
    }


def _own_samplers() -> dict[str, Callable[[int], dict[str, Any]]]:
    found: dict[str, Callable[[int], dict[str, Any]]] = {}
    for source in SOURCES:
        for when in ("opened", "at the first", "one at a time"):
            found[f"{source}, {when}"] = lambda size, source=source, when=when: {
                "sampler": Shuffled(size, source, when)
            }
            found[f"varying batches, {source}, {when}"] = lambda size, source=source, when=when: {
                "batch_sampler": VaryingBatches(size, source, when)
            }
            found[f"no batches, {source}, {when}"] = lambda size, source=source, when=when: {
                "batch_size": None,
                "sampler": Shuffled(size, source, when),
            }
    for when in ("opened", "one at a time"):
        found[f"shuffled batches, {when}"] = lambda size, when=when: {
            "batch_sampler": BatchSampler(Shuffled(size, "numpy", when), 4, drop_last=False)
        }
    return found


TORCH_SAMPLERS = _torch_samplers()
OWN_SAMPLERS = _own_samplers()
SAMPLERS = TORCH_SAMPLERS | OWN_SAMPLERS
"""Arguments of a `DataLoader`, by the kind of its sampler, made anew for so many samples."""


def make_loader(kind: str, dataset: Any, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    """Return a loader over a dataset, with the sampler of a kind."""
    arguments = SAMPLERS[kind](len(dataset))
    if "batch_sampler" not in arguments:
        arguments = {"batch_size": batch_size} | arguments
    return DataLoader(dataset, **arguments, **options)
