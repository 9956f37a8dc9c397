"""Random streams that samplers draw from, and the record from which a drawn order can be drawn again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelerate._base.helpers import warn_once

T = TypeVar("T")

_MAX_STATES = 10_000
"""States that a record keeps at most (5 kB each): a sampler that draws between training steps needs one a batch."""
_HEAD = 16
"""Items by which a repeated order is recognised."""


class RandomStream(NamedTuple):
    """A source of random numbers whose state can be taken and put back."""

    take: Callable[[], Any]
    put: Callable[[Any], Any]


def _global_streams() -> dict[str, RandomStream]:
    return {
        "python": RandomStream(random.getstate, random.setstate),
        "numpy": RandomStream(numpy.random.get_state, numpy.random.set_state),
        "torch": RandomStream(torch.get_rng_state, torch.set_rng_state),
    }


_GENERATORS = frozenset({torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator})
# Torch's own have one generator at most, under its name. Others are searched, which takes some time at each pass.
_TORCHS_OWN = frozenset(
    {DataLoader, BatchSampler, SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler}
)


def _stream_of(generator: Any) -> RandomStream:
    """Return the stream of a generator of random numbers."""
    if isinstance(generator, random.Random):
        return RandomStream(generator.getstate, generator.setstate)
    if isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        return RandomStream(lambda: bits.state, lambda state: setattr(bits, "state", state))
    return RandomStream(generator.get_state, generator.set_state)


def nested_samplers(loader: Any) -> list[Any]:
    """Return the batch samplers and samplers of a loader, from the outside in, each once."""
    found: dict[int, Any] = {}
    waiting = [loader]
    for owner in waiting:
        for part in (getattr(owner, "batch_sampler", None), getattr(owner, "sampler", None)):
            if part is not None and id(part) not in found:
                found[id(part)] = part
                waiting.append(part)
    return list(found.values())


def own_streams(owner: Any, samplers: Iterable[Any] | None = None) -> dict[str, RandomStream]:
    """Return the generators that a loader or sampler and samplers inside it have as attributes, each under a number."""
    owners = [owner, *(nested_samplers(owner) if samplers is None else samplers)]
    found: dict[int, Any] = {}
    for part in owners:
        is_torchs = type(part) in _TORCHS_OWN
        values = (getattr(part, "generator", None),) if is_torchs else getattr(part, "__dict__", {}).values()
        for value in values:
            if value is None:
                continue
            # Asked by isinstance, torch (2.13) answers in Python for its generators.
            if not _GENERATORS.isdisjoint(type(value).__mro__):
                found[id(value)] = value
            # A sampler of the user may keep another one under any name.
            elif isinstance(value, Sampler) and all(value is not known for known in owners):
                owners.append(value)
    found.pop(id(torch.default_generator), None)
    return {str(number): _stream_of(generator) for number, generator in enumerate(found.values())}


class RandomStreams:
    """The streams that a sampler may draw from, by name.

    Args:
        sampler: Its own generators, and those of samplers inside it, are among them.
        names: Those of the global ones that are: of python, numpy and torch.
    """

    def __init__(self, sampler: Any, names: Iterable[str] = ("python", "numpy", "torch")) -> None:
        everywhere = _global_streams()
        self._all = {name: everywhere[name] for name in names} | own_streams(sampler)

    def take(self) -> dict[str, Any]:
        """Return the states of all streams."""
        return {name: stream.take() for name, stream in self._all.items()}

    def put(self, states: Mapping[str, Any]) -> None:
        """Put back states; a stream without one keeps its own."""
        for name, state in states.items():
            if name in self._all:
                self._all[name].put(state)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Let a block draw; afterwards everything is as if it had not."""
        before = self.take()
        try:
            yield
        finally:
            self.put(before)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two states of a stream are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, numpy.ndarray):
        return numpy.array_equal(one, other)
    if isinstance(one, dict):
        return all(is_same(value, other[name]) for name, value in one.items())
    if isinstance(one, tuple):
        return all(map(is_same, one, other))
    return bool(one == other)


@dataclass
class OrderRecord:
    """What an order was drawn from, and how far it was drawn.

    Args:
        drawn: Items drawn so far, -1 before the sampler is opened.
        entries: States of streams, with the number of items that were drawn before them.
        head: The first items, as text.
        is_forked: Whether the sampler has streams for itself that began with these states, whatever others draw.
        is_complete: Whether all states were kept.
        is_exhausted: Whether the sampler was drawn to its end, after which it may have drawn random numbers once more.
    """

    drawn: int = -1
    entries: list[Any] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    is_forked: bool = False
    is_complete: bool = True
    is_exhausted: bool = False


class Draws:
    """The sampler of an epoch at work: it is opened and read here, and its record is written.

    Samplers draw when they are opened, at the first item, or as they go. A state is noted where a stream was used that
    had been used by others since, so one that has a stream for itself needs a single state.

    Args:
        streams: What the sampler draws from.
        record: What is known already; nothing if None.
    """

    def __init__(self, streams: RandomStreams, record: OrderRecord | None = None) -> None:
        self.streams = streams
        self.record = record or OrderRecord()
        self.is_watched = False
        self._after: dict[str, Any] = {}

    def note(self, count: int, before: Mapping[str, Any]) -> None:
        """Keep the states that a draw began with, after it, where others have used the stream since the last draw."""
        used: dict[str, Any] = {}
        for name, now in self.streams.take().items():
            if is_same(before[name], now):
                continue
            if name not in self._after or not is_same(self._after[name], before[name]):
                used[name] = before[name]
            self._after[name] = now
        record = self.record
        if not used or not record.is_complete:
            return
        record.entries.append((count, used))
        if len(record.entries) > _MAX_STATES:
            record.is_complete = False
            record.entries.clear()
            warn_once(
                f"A sampler has drawn random numbers between training steps {_MAX_STATES} times in an epoch, too often to "
                "record it: this epoch cannot be resumed in the same order. Draw the order at the start of `__iter__`, or "
                "from a generator of the sampler's own."
            )

    def follow(self, source: Iterable[T]) -> Iterator[T]:
        """Open a sampler, note what it draws for that, and count its items."""
        before = self.streams.take()
        items = iter(source)
        self.note(-1, before)
        self.record.drawn = 0
        return self._counted(items)

    def _counted(self, items: Iterator[T]) -> Iterator[T]:
        record = self.record
        for item in items:
            if record.drawn < _HEAD:
                record.head.append(str(item))
            record.drawn += 1
            yield item
        record.is_exhausted = True

    def watched(self, items: Iterator[T]) -> Iterator[T]:
        """Pass items, or batches of them, on, and note what was drawn for each."""
        while True:
            count, before = self.record.drawn, self.streams.take()
            try:
                item = next(items)
            except StopIteration:
                return
            self.note(count, before)
            yield item

    def at_once(self, items: Iterator[T]) -> Iterator[T]:
        """Pass items on that are all drawn with the first, and note what was drawn for them."""
        count, before = self.record.drawn, self.streams.take()
        drawn = list(items)
        self.note(count, before)
        yield from drawn

    def repeated(self, source: Iterable[T]) -> tuple[list[T], Iterator[T]]:
        """Draw again what was drawn, and return it with the iterator that goes on from there; streams are not used."""
        items: list[T] = []
        record = self.record
        with self.streams.borrowed():
            opening = [states for count, states in record.entries if count < 0]
            later = [(count, states) for count, states in record.entries if count >= 0]
            for states in opening:
                self.streams.put(states)
            opened = iter(source)
            for count, states in [*later, (max(record.drawn, 0), {})]:
                items += islice(opened, count - len(items))
                self.streams.put(states)
            if record.is_exhausted:
                items += opened
            self._after = self.streams.take()
        if record.head != [str(item) for item in items[: len(record.head)]]:
            warn_once(
                "A sampler gave another order than before from the same random states, so the rest of this epoch is not "
                "that of the run that was saved: samples may repeat or be missed until it ends. Let the order depend on "
                "random generators, an epoch or a seed alone, not on what the sampler has done before."
            )
        return items, self._counted(opened)

    def exhaust(self, source: Iterable[Any], length: int) -> None:
        """Draw everything again, and what the sampler draws after the last of `length` items from streams as they are."""
        past, rest = self.repeated(source)
        deque(islice(rest, length - len(past) + 1), maxlen=0)


def forked(source: Iterable[T], streams: RandomStreams, states: Mapping[str, Any], *, leads: bool) -> Iterator[T]:
    """Yield the items that a sampler draws from streams of its own, which begin with `states`.

    Args:
        leads: Whether the first item is drawn for this process too, whose streams then go on from there.
    """
    private: Mapping[str, Any] = states
    items: Iterator[T] | None = None
    while True:
        outside = streams.take()
        streams.put(private)
        try:
            items = iter(source) if items is None else items
            item = next(items)
        except StopIteration:
            return
        finally:
            private = streams.take()
            streams.put(private if leads else outside)
            leads = False
        yield item
