"""Shares of inputs, and functions that run on some processes only."""

from __future__ import annotations

import itertools
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate._base.errors import ConfigurationError
from accelerate.runtime.process_control import do_nothing, run_only_if, share_bounds, split_between


def shares(inputs: Any, world_size: int, apply_padding: bool = False) -> list[Any]:
    return [split_between(inputs, rank, world_size, apply_padding=apply_padding) for rank in range(world_size)]


@settings(deadline=None)
@given(st.lists(st.integers(), max_size=40), st.integers(1, 9))
def test_shares_are_the_inputs_in_order_once_each(inputs: list[int], world_size: int) -> None:
    found = shares(inputs, world_size)
    assert list(itertools.chain(*found)) == inputs
    lengths = [len(share) for share in found]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@settings(deadline=None)
@given(st.lists(st.integers(), min_size=1, max_size=40), st.integers(1, 9))
def test_padding_repeats_the_last_input_up_to_one_length(inputs: list[int], world_size: int) -> None:
    plain, padded = shares(inputs, world_size), shares(inputs, world_size, apply_padding=True)
    longest = max(len(share) for share in plain)
    for before, after in zip(plain, padded, strict=True):
        assert after == before + [inputs[-1]] * (longest - len(before))


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50))
def test_bounds_touch_and_cover(length: int, world_size: int) -> None:
    bounds = [share_bounds(length, rank, world_size) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (["a", "b", "c"], [["a", "b"], ["c"]]),
        (("a", "b", "c"), [("a", "b"), ("c",)]),
        ("abc", ["abc", "abc"]),
        (b"abc", [b"abc", b"abc"]),
        (range(3), [range(3), range(3)]),
        ({"x": [1, 2, 3], "y": "ab"}, [{"x": [1, 2], "y": "ab"}, {"x": [3], "y": "ab"}]),
        (["a"], [["a"], []]),
        ([], [[], []]),
        (7, [7, 7]),
    ],
)
def test_kinds_of_inputs(inputs: Any, expected: list[Any]) -> None:
    assert shares(inputs, 2) == expected


def test_tensors_are_split_and_arrays_are_not() -> None:
    inputs = torch.arange(10).reshape(5, 2)
    assert [share.tolist() for share in shares(inputs, 3)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    padded = shares(inputs, 3, apply_padding=True)
    assert [share.tolist() for share in padded] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [8, 9]]]
    array = numpy.arange(5)
    for apply_padding in (False, True):
        assert all(share is array for share in shares(array, 3, apply_padding=apply_padding))
        found = shares({"array": array, "list": [1, 2, 3]}, 3, apply_padding=apply_padding)
        assert [(share["array"] is array, share["list"]) for share in found] == [(True, [1]), (True, [2]), (True, [3])]
    assert shares(torch.tensor(3), 2) == [torch.tensor(3)] * 2


@pytest.mark.parametrize(
    ("inputs", "last"),
    [("abc", "abc"), (("a", "b", "c"), ("c", "c")), (range(3), range(3)), ({"x": [1, 2, 3]}, {"x": [3, 3]})],
)
def test_padding_of_other_kinds(inputs: Any, last: Any) -> None:
    assert shares(inputs, 2, apply_padding=True)[1] == last


def test_fewer_inputs_than_ranks_gives_empty_shares_of_the_same_kind() -> None:
    assert shares(["only"], 3) == [["only"], [], []]
    tensors = shares(torch.ones(1, 4), 3)
    assert [tuple(share.shape) for share in tensors] == [(1, 4), (0, 4), (0, 4)]
    assert shares(["only"], 3, apply_padding=True) == [["only"]] * 3


def test_a_dataset() -> None:
    from datasets import Dataset

    data = Dataset.from_dict({"number": list(range(5)), "text": list("abcde")})
    found = shares(data, 3)
    assert all(isinstance(share, Dataset) for share in found)
    assert [list(share["number"]) for share in found] == [[0, 1], [2, 3], [4]]
    assert [list(share["text"]) for share in shares(data, 3, apply_padding=True)] == [
        ["a", "b"],
        ["c", "d"],
        ["e", "e"],
    ]
    assert [len(share) for share in shares(data.select([0]), 3)] == [1, 0, 0]


def test_a_mapping_of_unequal_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'x': 2, 'y': 3"):
        split_between({"x": [1, 2], "y": [1, 2, 3]}, 0, 2)


def test_a_value_without_length_in_a_mapping_stays_whole() -> None:
    inputs = {"x": [1, 2], "temperature": 0.5, "scale": torch.tensor(2.0)}
    assert shares(inputs, 2) == [{"x": [1], "temperature": 0.5, "scale": torch.tensor(2.0)}, {**inputs, "x": [2]}]


def test_one_process_gets_the_very_inputs() -> None:
    inputs = {"x": [1, 2], "y": [1]}
    assert split_between(inputs, 0, 1) is inputs


def test_a_restricted_function_asks_at_each_call() -> None:
    allowed = False

    @lambda function: run_only_if(lambda: allowed, function)
    def add(left: int, right: int = 1) -> int:
        """Add."""
        return left + right

    assert add(1) is None
    allowed = True
    assert add(1, right=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Add.")
    assert do_nothing(1, any_argument=2) is None
