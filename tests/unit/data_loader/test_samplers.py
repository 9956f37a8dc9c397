"""The observed tables of sharding, and what must hold for any sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from accelerate.data_loader.samplers import data_shard


class Counting(IterableDataset):
    """The numbers below `length`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


def sampler(samples: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(samples)), batch_size, drop_last)


def shards(batches: Any, count: int, **options: Any) -> list[list[list[int]]]:
    return [list(BatchSamplerShard(batches, count, rank, **options)) for rank in range(count)]


def numbers(text: str) -> list[list[list[int]]]:
    """Read "01 45 | 23 67" as the batches of two ranks."""
    return [[[int(digit) for digit in batch] for batch in rank.split()] for rank in text.split("|")]


EVEN = {
    8: "01 45 | 23 67",
    7: "01 45 | 23 60",
    6: "01 45 | 23 01",
    5: "01 40 | 23 12",
    3: "01 | 20",
    2: "01 | 01",
    1: "00 | 00",
}
UNEVEN = {8: "01 45 | 23 67", 7: "01 45 | 23 6", 6: "01 45 | 23", 5: "01 4 | 23", 3: "01 | 2", 2: "01 | "}


@pytest.mark.parametrize("samples", EVEN)
def test_even_batches(samples: int) -> None:
    assert shards(sampler(samples, 2), 2) == numbers(EVEN[samples])


@pytest.mark.parametrize("samples", UNEVEN)
def test_uneven_batches(samples: int) -> None:
    assert shards(sampler(samples, 2), 2, even_batches=False) == numbers(UNEVEN[samples])


@pytest.mark.parametrize("samples", [5, 7])
def test_drop_last(samples: int) -> None:
    assert shards(sampler(samples, 2, drop_last=True), 2) == numbers("01 | 23")


@pytest.mark.parametrize(
    ("samples", "even", "expected"),
    [(7, True, "01 45 | 23 60"), (7, False, "01 45 | 23 6"), (5, False, "01 4 | 23"), (1, True, "00 | 00")],
)
def test_split_batches(samples: int, even: bool, expected: str) -> None:
    assert shards(sampler(samples, 4), 2, split_batches=True, even_batches=even) == numbers(expected)


def test_padding_cycles_over_the_whole_first_round() -> None:
    assert shards(sampler(9, 2), 4) == numbers("01 80 | 23 12 | 45 34 | 67 56")


@pytest.mark.parametrize(
    ("batches", "count", "even", "expected"),
    [
        ([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]], 3, True, "012 9 | 34 012 | 5678 34"),
        ([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9]], 3, False, "012 9 | 34 | 5678"),
        ([[0, 1]], 3, True, "01 | 01 | 01"),
    ],
)
def test_batches_of_unknown_size(batches: list[list[int]], count: int, even: bool, expected: str) -> None:
    assert shards(batches, count, even_batches=even) == numbers(expected)


class Irregular(BatchSampler):
    """A batch sampler with a declared size that not every batch has."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches
        self.batch_size = 2
        self.drop_last = False

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_a_short_batch_in_the_middle_loses_no_sample() -> None:
    assert shards(Irregular([[0, 1], [2], [3, 4], [5, 6]]), 2) == numbers("01 34 | 2 56")


@pytest.mark.parametrize(("samples", "count"), [(5, 2), (9, 2), (9, 4), (5, 3)])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("even", [True, False])
def test_length_is_the_number_of_batches(samples: int, count: int, drop_last: bool, even: bool) -> None:
    for rank in range(count):
        shard = BatchSamplerShard(sampler(samples, 2, drop_last), count, rank, even_batches=even)
        assert len(shard) == len(list(shard))


def test_split_needs_a_divisible_known_size() -> None:
    with pytest.raises(ValueError, match="3 processes cannot share"):
        BatchSamplerShard(sampler(8, 4), 3, 0, split_batches=True)
    with pytest.raises(ValueError, match="batch_size=None"):
        BatchSamplerShard([[0, 1]], 2, 0, split_batches=True)
    with pytest.raises(ValueError, match="3 processes cannot share"):
        IterableDatasetShard(Counting(8), 4, False, 3, 0, split_batches=True)


sizes = st.integers(1, 5)


@given(samples=st.integers(0, 40), batch_size=sizes, count=sizes)
@settings(max_examples=200, deadline=None)
def test_every_sample_once_without_padding(samples: int, batch_size: int, count: int) -> None:
    parts = shards(sampler(samples, batch_size), count, even_batches=False)
    assert sorted(index for part in parts for batch in part for index in batch) == list(range(samples))


@given(samples=st.integers(1, 40), batch_size=sizes, count=st.integers(2, 5), split=st.booleans())
@settings(max_examples=200, deadline=None)
def test_padding_only_at_the_end(samples: int, batch_size: int, count: int, split: bool) -> None:
    size = batch_size * count if split else batch_size
    parts = shards(sampler(samples, size), count, split_batches=split)
    steps = [[index for part in parts for index in part[step]] for step in range(len(parts[0]))]
    assert {len(part) for part in parts} == {len(steps)}
    assert {len(step) for step in steps} == {batch_size * count}
    flat = [index for step in steps for index in step]
    assert flat[:samples] == list(range(samples))


@given(samples=st.integers(1, 40), batch_size=sizes, count=sizes, skip=st.integers(0, 12), even=st.booleans())
@settings(max_examples=200, deadline=None)
def test_skipping_equals_dropping(samples: int, batch_size: int, count: int, skip: int, even: bool) -> None:
    for rank in range(count):
        shard = BatchSamplerShard(sampler(samples, batch_size), count, rank, even_batches=even)
        assert list(SkipBatchSampler(shard, skip)) == list(shard)[skip:]
    plain = sampler(samples, batch_size)
    assert list(SkipBatchSampler(plain, skip)) == list(plain)[skip:]
    assert len(SkipBatchSampler(plain, skip)) == len(list(plain)[skip:])


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(7, [[0, 1, 4, 5], [2, 3, 6, 0]]), (5, [[0, 1, 4, 0], [2, 3, 1, 2]]), (1, [[0, 0], [0, 0]])],
)
@pytest.mark.parametrize("split", [True, False])
def test_iterable(samples: int, expected: list[list[int]], split: bool) -> None:
    size = 4 if split else 2
    parts = [IterableDatasetShard(Counting(samples), size, False, 2, rank, split) for rank in range(2)]
    assert [list(part) for part in parts] == expected
    assert [len(part) for part in parts] == [len(entries) for entries in expected]


def test_iterable_drop_last() -> None:
    parts = [IterableDatasetShard(Counting(7), 2, True, 2, rank) for rank in range(2)]
    assert [list(part) for part in parts] == [[0, 1], [2, 3]]
    assert [len(part) for part in parts] == [2, 2]


def test_a_mesh_gives_peers_the_same_share() -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    assert [data_shard(rank, 8, sizes)[0] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data_shard(5, 8, sizes)[1] == 4
    assert data_shard(5, 8, {"tp": 4}, divides_by_tensor_parallel=True) == (1, 2)
    assert data_shard(5, 8, None) == (5, 8)
