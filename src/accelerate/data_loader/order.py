"""The order of an epoch: a function of a base seed and the epoch's number, or what a sampler drew, recorded."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate.collectives.base import communicator

T = TypeVar("T")


def agree(value: T) -> T:
    """Return rank 0's value on every rank."""
    group = communicator()
    if group.world_size == 1:
        return value
    values = [value]
    group.broadcast_objects(values)
    return values[0]


class EpochSeed:
    """Give each epoch its seed: a base, drawn once or given, plus the epoch's number.

    Args:
        base: The base if it is known; otherwise it is drawn at the first epoch as `RandomSampler` draws its seed.
        generator: Where to draw from; torch's global generator if None.
        leaves_no_trace: Whether the global generator is put back after the draw, for samplers that plain PyTorch would
            not have drawn a seed for.
        shared: Whether ranks must agree: they then take rank 0's base.
    """

    def __init__(
        self,
        base: int | None = None,
        *,
        generator: torch.Generator | None = None,
        leaves_no_trace: bool = False,
        shared: bool = False,
    ) -> None:
        self.base = base
        self.generator = generator
        self.leaves_no_trace = leaves_no_trace
        self.is_agreed = not shared
        self._draws = base is None

    def at(self, epoch: int) -> int:
        """Return the seed of an epoch; the first call fixes the base."""
        # Plain PyTorch draws at every epoch: keep drawing, so that what follows sees the same random numbers.
        if self._draws and not (self.leaves_no_trace and self.base is not None):
            drawn = self._draw()
            if self.base is None:
                self.base = drawn
        if not self.is_agreed:
            self.base = agree(self.base or 0)
            self.is_agreed = True
        return (self.base or 0) + epoch

    def restore(self, base: int) -> None:
        """Go on with a base that was saved by all ranks."""
        self.base = base
        self.is_agreed = True

    def _draw(self) -> int:
        before = torch.get_rng_state() if self.leaves_no_trace and self.generator is None else None
        drawn = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        if before is not None:
            torch.set_rng_state(before)
        return drawn


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` whose order depends on its seed and epoch alone.

    Args:
        data_seed: The base seed (keyword only); the seed torch was started with if None.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        seed: EpochSeed | None = kwargs.pop("seed", None)
        super().__init__(*args, **kwargs)
        if self.generator is None:
            self.generator = torch.Generator()
        self.seed = seed or EpochSeed(torch.random.initial_seed() if data_seed is None else data_seed)
        self.epoch = 0

    @classmethod
    def like(cls, sampler: RandomSampler, seed: EpochSeed) -> SeedableRandomSampler:
        """Return a sampler like the given one, whose order depends on the seed and the epoch."""
        generator = sampler.generator
        if generator is not None and seed.base is None:
            seed.generator, generator = generator, None
        return cls(
            data_source=sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=generator,
            seed=seed,
        )

    @property
    def initial_seed(self) -> int | None:
        """The base seed, None while it is not drawn."""
        return self.seed.base

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed.at(self.epoch))
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def head_and_rest(self, head: int, start: int) -> tuple[list[int], Iterator[int]]:
        """Return the first `head` indices of the epoch and those after the first `start`."""
        size = len(self.data_source)
        if self.replacement or self.num_samples != size:
            return split_head(iter(self), head, start)
        self.generator.manual_seed(self.seed.at(self.epoch))
        order = torch.randperm(size, generator=self.generator)
        return order[:head].tolist(), _listed(order[start:])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch


class EpochOrder:
    """Open a sampler or batch sampler in the order of an epoch; this one does not shuffle, or seeds itself."""

    seed: EpochSeed | None = None
    recorded: list[Any] | None = None
    """What the sampler drew for the epoch, for orders that are recorded."""

    def open(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Start an iteration over `source`."""
        return iter(source)


class GeneratorOrder(EpochOrder):
    """The order of a sampler that shuffles with its `generator` attribute, seeded anew at each epoch."""

    def __init__(self, sampler: Any, seed: EpochSeed) -> None:
        self.sampler = sampler
        self.seed: EpochSeed = seed

    def open(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        if self.sampler.generator is None:
            self.sampler.generator = torch.Generator()
        self.sampler.generator.manual_seed(self.seed.at(epoch))
        return iter(source)


class GlobalRngOrder(EpochOrder):
    """The order of a sampler that may shuffle with any global generator (python, numpy, torch)."""

    def __init__(self, seed: EpochSeed) -> None:
        self.seed: EpochSeed = seed

    def open(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        # Samplers shuffle when they are opened or asked for the first time.
        with seeded_globals(self.seed.at(epoch)):
            opened = iter(source)
            try:
                first = next(opened)
            except StopIteration:
                return
        yield first
        yield from opened


class RecordedOrder(EpochOrder):
    """The order that the user's own sampler draws at the start of an epoch, kept so that its rest can be read again.

    A pass that begins an epoch draws; the rest of one takes what was recorded with its resume point.

    Args:
        shared: Whether ranks must agree: they then take rank 0's order.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared

    def open(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        if self.recorded is None:
            drawn = list(source)
            self.recorded = agree(drawn) if self.shared else drawn
        return iter(self.recorded)


@contextmanager
def seeded_globals(seed: int) -> Iterator[None]:
    """Seed the global generators of python, numpy and torch's CPU, and put them back afterwards."""
    numpy = sys.modules.get("numpy")
    saved_python, saved_torch = random.getstate(), torch.get_rng_state()
    saved_numpy = None if numpy is None else numpy.random.get_state()
    try:
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        yield
    finally:
        random.setstate(saved_python)
        torch.set_rng_state(saved_torch)
        if numpy is not None:
            numpy.random.set_state(saved_numpy)


def resolve_order(sampler: Any, batch_sampler: Any, *, shared: bool) -> EpochOrder:
    """Return how the order of a sampler inside a batch sampler (None if there is none) is fixed."""
    is_plain = batch_sampler is None or type(batch_sampler) is BatchSampler
    if is_plain and type(sampler) in (SequentialSampler, SeedableRandomSampler, range, list, tuple):
        return EpochOrder()
    if is_plain and isinstance(getattr(sampler, "generator", False), (torch.Generator, type(None))):
        generator = sampler.generator
        seed = EpochSeed(generator=generator, leaves_no_trace=generator is None, shared=shared)
        return GeneratorOrder(sampler, seed)
    return GlobalRngOrder(EpochSeed(leaves_no_trace=True, shared=shared))


_EXACT_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, SeedableRandomSampler)


def has_exact_length(sampler: Any) -> bool:
    """Return whether a sampler surely gives as many samples as its `len` says; a user's own may not."""
    return type(sampler) in _EXACT_SAMPLERS


def head_and_rest(
    sampler: Any, head: int, start: int, order: EpochOrder, epoch: int
) -> tuple[list[int], Iterator[int]]:
    """Return the first `head` indices of an epoch and those after the first `start`; no sample is read."""
    if type(sampler) is SequentialSampler:
        size = len(sampler)
        return list(range(min(head, size))), iter(range(start, size))
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.head_and_rest(head, start)
    return split_head(order.open(sampler, epoch), head, start)


def split_head(indices: Iterator[int], head: int, start: int) -> tuple[list[int], Iterator[int]]:
    """Return the first `head` of the indices and those after the first `start`."""
    first = list(islice(indices, head))
    if start >= head:
        return first, islice(indices, start - head, None)
    return first, chain(first[start:], indices)


def _listed(order: torch.Tensor) -> Iterator[int]:
    """Yield numbers, made from a tensor a piece at a time: a list of millions takes longer than the shuffle."""
    for piece in order.split(1 << 16):
        yield from piece.tolist()
