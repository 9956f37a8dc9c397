"""The order of an epoch: what a sampler draws, recorded, or a function of a base seed and the epoch's number."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate.collectives.base import communicator
from accelerate.data_loader.draws import Draws, OrderRecord, RandomStreams, forked

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

    def head_and_rest(self, head: int, start: int, origin: int = 0) -> tuple[list[int], Iterator[int]]:
        """Return the `head` indices after the first `origin` of the epoch, and those after the first `start`."""
        size = len(self.data_source)
        if self.replacement or self.num_samples != size:
            return split_head(iter(self), head, start, origin)
        self.generator.manual_seed(self.seed.at(self.epoch))
        order = torch.randperm(size, generator=self.generator)
        return order[origin : origin + head].tolist(), _listed(order[start:])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch


class EpochOrder:
    """Open a sampler or batch sampler in the order of an epoch; this one does not shuffle, or seeds itself."""

    seed: EpochSeed | None = None
    record: OrderRecord | None = None
    """What draws the order of the epoch again, None if that is a function of seed and epoch."""

    def restore(self, record: OrderRecord | None) -> None:
        """Let the next pass have the order of a record; None if it begins an epoch."""

    def open(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Start an iteration over `source`."""
        return iter(source)

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass on what was made of the opened source, batch by batch, and note what is drawn for it."""
        return batches

    def finished(self) -> AbstractContextManager[None]:
        """Have the source drawn to its end, for the time of a block."""
        return nullcontext()


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


class DrawnOrder(EpochOrder):
    """The order that a sampler draws by itself, as in a plain loop, with a record from which it is drawn again.

    On several processes rank 0 draws, from its own random streams, and the others take its order: of torch's samplers by
    the state before their first index; of any other by its indices, or, where nobody can say how many there are, by the
    states that each process then draws from.

    Args:
        shared: Whether ranks must agree.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.record: OrderRecord | None = None
        self._source: Iterable[Any] = ()
        self._draws: Draws | None = None
        self._restored: OrderRecord | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The pass at hand belongs to this object alone.
        return {**self.__dict__, "_source": (), "_draws": None}

    def restore(self, record: OrderRecord | None) -> None:
        self._restored = record

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Draw what the sampler draws after its last index, for the time of a block; torch's `RandomSampler` does so."""
        draws, length = self._draws, length_of(self._source)
        is_known = draws is not None and draws.record.is_complete and not draws.record.is_forked
        if draws is None or not is_known or draws.record.is_exhausted or length is None:
            yield
            return
        with draws.streams.borrowed():
            Draws(draws.streams, deepcopy(draws.record)).exhaust(self._source, length)
            yield

    def open(self, source: Iterable[Any], epoch: int) -> Iterator[Any]:
        sampler = source.sampler if isinstance(source, SingleIndices) else source
        # Kept until the next pass: with worker processes torch opens its sampler twice, and uses the second.
        restored = deepcopy(self._restored)
        self._source, self._draws, self.record = source, None, None
        if type(sampler) in _NOT_SHUFFLED:
            return iter(source)
        if _draws_at_once(sampler):
            # Opened at the first index, where these samplers draw: before that, the loader draws a seed.
            return chain.from_iterable(self._open_at_once(source, sampler, restored))
        streams = RandomStreams(source)
        if not self.shared:
            return self._open_watched(source, streams, restored)
        if type(sampler) is RandomSampler:
            return self._drawn_by_each(source, RandomStreams(source, ()), restored)
        opened = None
        is_forked = restored is not None and restored.is_forked
        if communicator().rank == 0 and length_of(source) is not None and not is_forked:
            opened = self._open_watched(source, streams, restored)
        return self._drawn_for_all(source, streams, restored, opened)

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        draws = self._draws
        return batches if draws is None or not draws.is_watched else draws.watched(batches)

    def _open_at_once(
        self, source: Iterable[Any], sampler: Any, restored: OrderRecord | None
    ) -> Iterator[Iterator[Any]]:
        """Yield the opened sampler, and note its end."""
        is_global = sampler.generator in (None, torch.default_generator)
        streams = RandomStreams(sampler, ("torch",) if is_global else ())
        state = restored.entries[0][1] if restored is not None and restored.entries else streams.take()
        if self.shared:
            state = agree(state)
        was_exhausted = restored is not None and restored.is_exhausted
        draws = self._begin(streams, OrderRecord(1, [(-1, state)], is_exhausted=was_exhausted))
        # A generator that the user gave goes the same way on each rank; a global one is used on rank 0 alone.
        if restored is None and not (self.shared and is_global and communicator().rank):
            streams.put(state)
            yield iter(source)
        else:
            with streams.borrowed():
                streams.put(state)
                opened = iter(source)
                first = list(islice(opened, None if was_exhausted else 1))
            yield chain(first, opened)
        draws.record.is_exhausted = True

    def _open_watched(
        self, source: Iterable[Any], streams: RandomStreams, restored: OrderRecord | None
    ) -> Iterator[Any]:
        """Open a sampler of the user, or open it again where it was."""
        draws = self._begin(streams, restored)
        if draws.record.is_forked:
            return forked(source, streams, draws.record.entries[0][1], leads=False)
        items = draws.follow(source) if restored is None else chain(*draws.repeated(source))
        if self.shared:
            length = length_of(source)
            # One more than it says shows whether it says the truth.
            return draws.at_once(islice(items, None if length is None else length + 1))
        draws.is_watched = True
        return items

    def _drawn_by_each(
        self, source: Iterable[Any], streams: RandomStreams, restored: OrderRecord | None
    ) -> Iterator[Any]:
        """Yield what each rank draws, with the first item, from the generator of the user as rank 0 has it."""
        restored, states = agree((restored, streams.take()))
        streams.put(states)
        yield from self._open_watched(source, streams, restored)

    def _drawn_for_all(
        self, source: Iterable[Any], streams: RandomStreams, restored: OrderRecord | None, opened: Iterator[Any] | None
    ) -> Iterator[Any]:
        """Yield what rank 0 draws, with the first item: a sampler that drew nothing before draws after the loader."""
        is_first = communicator().rank == 0
        order = agree(self._order_for_all(source, streams, restored, opened) if is_first else [])
        if isinstance(order, list):
            yield from order
        else:
            yield from forked(source, streams, order, leads=is_first and restored is None)

    def _order_for_all(
        self, source: Iterable[Any], streams: RandomStreams, restored: OrderRecord | None, opened: Iterator[Any] | None
    ) -> list[Any] | dict[str, Any]:
        """Return the items of an epoch; the states to draw them from if there may be no end of them."""
        states = streams.take()
        if opened is not None:
            restored = self.record
            items = list(opened)
            if len(items) <= (length_of(source) or 0):
                return items
            streams.put(states)
        for count, opening in () if restored is None else restored.entries:
            states |= opening if count < 0 else {}
        self._begin(streams, OrderRecord(0, [(-1, states)], is_forked=True))
        return states

    def _begin(self, streams: RandomStreams, record: OrderRecord | None) -> Draws:
        self._draws = Draws(streams, record)
        self.record = self._draws.record
        return self._draws


class SingleIndices:
    """The indices of a sampler as batches of one."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in self.sampler)


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


def seeded_order(sampler: Any, *, shared: bool) -> EpochOrder:
    """Return how the order of a sampler becomes a function of a seed and the epoch."""
    if type(sampler) in _NOT_SHUFFLED:
        return EpochOrder()
    if isinstance(getattr(sampler, "generator", False), (torch.Generator, type(None))):
        generator = sampler.generator
        seed = EpochSeed(generator=generator, leaves_no_trace=generator is None, shared=shared)
        return GeneratorOrder(sampler, seed)
    return GlobalRngOrder(EpochSeed(leaves_no_trace=True, shared=shared))


_NOT_SHUFFLED = (SequentialSampler, SeedableRandomSampler, range, list, tuple)
_EXACT_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, SeedableRandomSampler)


def _draws_at_once(sampler: Any) -> bool:
    """Return whether a sampler is one of torch's and uses its random stream for the first index alone."""
    if type(sampler) is RandomSampler:
        is_one_permutation = not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
        return sampler.generator is None or is_one_permutation
    return type(sampler) in (SubsetRandomSampler, WeightedRandomSampler)


def length_of(source: Any) -> int | None:
    """Return the length that a sampler, dataset or loader says it has, None if it says none."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def has_exact_length(sampler: Any) -> bool:
    """Return whether a sampler surely gives as many samples as its `len` says; a user's own may not."""
    return type(sampler) in _EXACT_SAMPLERS


def head_and_rest(
    sampler: Any, head: int, start: int, order: EpochOrder, epoch: int, origin: int = 0
) -> tuple[list[int], Iterator[int]]:
    """Return the `head` indices after the first `origin` of an epoch, and those after the first `start`.

    No sample is read.
    """
    if type(sampler) is SequentialSampler:
        size = len(sampler)
        return list(range(origin, min(origin + head, size))), iter(range(start, size))
    if isinstance(sampler, SeedableRandomSampler):
        return sampler.head_and_rest(head, start, origin)
    if not start:
        return [], order.open(sampler, epoch)
    return split_head(order.open(sampler, epoch), head, start, origin)


def split_head(indices: Iterator[int], head: int, start: int, origin: int = 0) -> tuple[list[int], Iterator[int]]:
    """Return the `head` indices after the first `origin`, and those after the first `start`."""
    indices, start = islice(indices, origin, None), start - origin
    first = list(islice(indices, head))
    if start >= head:
        return first, islice(indices, start - head, None)
    return first, chain(first[start:], indices)


def batched(indices: Iterator[int], size: int, drop_last: bool) -> Iterator[list[int]]:
    """Yield batches of indices, as torch's `BatchSampler` makes them."""
    while batch := list(islice(indices, size)):
        if drop_last and len(batch) < size:
            return
        yield batch


def _listed(order: torch.Tensor) -> Iterator[int]:
    """Yield numbers, made from a tensor a piece at a time: a list of millions takes longer than the shuffle."""
    for piece in order.split(1 << 16):
        yield from piece.tolist()
