"""Smaller batches on a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.collectives.out_of_memory import find_executable_batch_size


def full() -> Any:
    raise torch.OutOfMemoryError("the device is full")


def test_nine_tenths_until_it_fits_and_the_size_stays() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size: int, *args: Any, **kwargs: Any) -> Any:
        tried.append(batch_size)
        return full() if batch_size > 90 else (batch_size, args, kwargs)

    assert train(1, key=2) == (82, (1,), {"key": 2})
    assert tried == [128, 115, 103, 92, 82]
    assert train() == (82, (), {})
    assert tried == [128, 115, 103, 92, 82, 82]


def test_a_function_of_its_own_says_the_next_size() -> None:
    sizes = iter([7, 3])
    tried: list[int] = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        return full() if batch_size > 3 else batch_size

    assert find_executable_batch_size(train, 10, lambda: next(sizes))() == 3
    assert tried == [10, 7, 3]


def test_only_divisors_keep_the_update() -> None:
    from accelerate import Accelerator

    tried: list[tuple[int, int]] = []

    @find_executable_batch_size(starting_batch_size=12, keep_update=True)
    def train(batch_size: int) -> None:
        tried.append((batch_size, Accelerator().gradient_accumulation_steps))
        if batch_size > 3:
            full()

    train()
    assert tried == [(12, 1), (6, 2), (4, 3), (3, 4)]


@pytest.mark.parametrize(("options", "last"), [({}, 1), ({"minimum_batch_size": 4}, 4)])
def test_no_size_fits(options: dict[str, int], last: int) -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8, **options)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        full()

    with pytest.raises(UsageError, match=f"from 8 down to {last} fits"):
        train()
    assert tried[-1] == last


def test_other_errors_pass_through() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise ValueError(f"with {batch_size}")

    with pytest.raises(ValueError, match="with 128"):
        train()


def test_a_call_with_a_batch_size_of_its_own() -> None:
    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int, model: str) -> None: ...

    with pytest.raises(TypeError, match=r"Write train\(model='m'\)"):
        train(64, "m")
    with pytest.raises(TypeError, match="is filled in"):

        @find_executable_batch_size
        def nothing() -> None: ...

        nothing()


@pytest.mark.parametrize(
    "options",
    [
        {"minimum_batch_size": 0},
        {"keep_update": True, "reduce_batch_size_fn": lambda: 1},
    ],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        find_executable_batch_size(lambda batch_size: None, **options)


@pytest.mark.parametrize("options", [{"starting_batch_size": 0}, {"starting_batch_size": 2, "minimum_batch_size": 4}])
def test_no_size_to_try_is_told_when_the_function_is_called(options: dict[str, Any]) -> None:
    def train(batch_size: int) -> None:
        raise AssertionError("there is nothing to try")

    for decorated in (find_executable_batch_size(train, **options), find_executable_batch_size(**options)(train)):
        with pytest.raises(RuntimeError, match="leave no batch size to try"):
            decorated()


def test_what_the_failed_try_held_is_freed() -> None:
    import weakref

    class Big: ...

    held: list[weakref.ref[Big]] = []

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> bool:
        big = Big()
        held.append(weakref.ref(big))
        if batch_size == 2:
            full()
        return held[0]() is None

    assert train()
