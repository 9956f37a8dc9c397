"""Rows, packed batches and steps of a dispatched loader, without processes."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate.data_loader.channel import BatchUnpacker, PackedBatch
from accelerate.data_loader.dispatcher import CannotJoinError, StepAssembler, count_rows, cut_rows, join_rows


class Pair(NamedTuple):
    left: Any
    right: Any


def roundtrip(batch: Any) -> Any:
    packed = PackedBatch(batch)
    buffer = torch.zeros(packed.tensor_bytes, dtype=torch.uint8)
    packed.write(buffer, 0)
    return BatchUnpacker(buffer, 0, packed.others).build(packed.structure)


BATCHES = [
    torch.arange(6).view(2, 3),
    [torch.ones(2, dtype=torch.bool), torch.zeros(2, 0), torch.tensor(3.5)],
    {"text": ["a", "b"], "x": torch.ones(2, 2, dtype=torch.bfloat16), "n": None},
    Pair(torch.arange(2), {"deep": (torch.ones(2, dtype=torch.complex64), "word")}),
    UserDict({"ids": torch.arange(4).view(2, 2).t()}),
    [{"boxes": torch.ones(3, 4)}, {"boxes": torch.ones(1, 4)}],
    "only text",
]


@pytest.mark.parametrize("batch", BATCHES)
def test_a_packed_batch_arrives_as_it_was(batch: Any) -> None:
    arrived = roundtrip(batch)
    assert type(arrived) is type(batch)
    assert str(arrived) == str(batch)


def test_the_same_structure_compares_equal() -> None:
    assert PackedBatch({"x": torch.ones(2)}).structure == PackedBatch({"x": torch.zeros(2)}).structure
    assert PackedBatch({"x": torch.ones(2)}).structure != PackedBatch({"x": torch.ones(3)}).structure


@pytest.mark.parametrize(("batch", "rows"), list(zip(BATCHES, [2, 2, 2, 2, 2, 3, None], strict=True)))
def test_counting(batch: Any, rows: int | None) -> None:
    assert count_rows(batch) == rows


def test_cutting_and_joining() -> None:
    one = {"x": torch.arange(3), "text": ["a", "b", "c"], "same": 7, "scalar": torch.tensor(1.0)}
    two = {"x": torch.arange(2), "text": ["d", "e"], "same": 7, "scalar": torch.tensor(1.0)}
    joined = join_rows([one, two], [3, 2])
    assert joined["x"].tolist() == [0, 1, 2, 0, 1]
    assert joined["text"] == ["a", "b", "c", "d", "e"]
    assert joined["same"] == 7
    part = cut_rows(joined, 5, slice(2, 4))
    assert (part["x"].tolist(), part["text"], part["same"]) == ([2, 0], ["c", "d"], 7)
    with pytest.raises(CannotJoinError):
        join_rows([torch.ones(2, 3), torch.ones(2, 4)], [2, 2])
    with pytest.raises(CannotJoinError):
        join_rows([{"x": torch.ones(2)}, {"y": torch.ones(2)}], [2, 2])


def test_columns_are_not_samples() -> None:
    batch = [torch.arange(2), torch.arange(2) + 5]
    assert [column.tolist() for column in cut_rows(batch, 2, slice(0, 1))] == [[0], [5]]


def pieces(samples: int, batch_size: int, count: int, **options: Any) -> list[list[tuple[list[int], int | None]]]:
    per_step = options.pop("per_step", count)
    steps = StepAssembler(count, per_step, **options).steps(iter(torch.arange(samples).split(batch_size)))
    return [[(piece.tolist(), real) for piece, real in zip(step.pieces, step.real, strict=True)] for step in steps]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (7, [[([0, 1], 2), ([2, 3], 2)], [([4, 5], 2), ([6, 0], 1)]]),
        (5, [[([0, 1], 2), ([2, 3], 2)], [([4], 1), ([0], 0)]]),
    ],
)
def test_observed_steps(samples: int, expected: Any) -> None:
    assert pieces(samples, 2, 2) == expected
    assert pieces(samples, 2, 2, drop_last=True)[0] == expected[0]
    assert pieces(samples, 4, 2, per_step=1) == expected


def test_drop_last_drops_an_incomplete_step() -> None:
    assert len(pieces(6, 2, 2, drop_last=True)) == 1


@given(samples=st.integers(1, 40), batch_size=st.integers(1, 5), count=st.integers(1, 4), start=st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_every_sample_once(samples: int, batch_size: int, count: int, start: int) -> None:
    steps = list(StepAssembler(count, count).steps(iter(torch.arange(samples).split(batch_size)), start))
    seen = [
        index
        for step in steps
        for piece, real in zip(step.pieces, step.real, strict=True)
        for index in piece.tolist()[:real]
    ]
    assert seen == list(range(start, samples))
    if steps:
        assert steps[-1].consumed == samples
    for step in steps:
        assert len({len(piece) for piece in step.pieces}) == 1


def test_batches_that_cannot_be_joined_stay_whole() -> None:
    batches = [torch.zeros(2, 1), torch.zeros(2, 2), torch.zeros(2, 3), torch.zeros(1, 4)]
    steps = list(StepAssembler(3, 3).steps(iter(batches)))
    assert [tuple(piece.shape) for piece in steps[0].pieces] == [(2, 1), (2, 2), (2, 3)]
    assert [piece.shape[1] for piece in steps[1].pieces] == [4, 4, 4]
    assert steps[1].real == [1, 0, 0]
