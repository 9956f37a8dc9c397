"""A trace in which torch lost a constant is made again, and any other failure is told at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from accelerate.parallel.pipeline_tracing import _trace_with_retries

LOST = "We found a fake tensor in the exported program constant's list."


def failing(times: int, message: str) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def attempt() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise RuntimeError("cannot capture the model") from RuntimeError(message)
        return "traced"

    return attempt, calls


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_lost_constant_is_traced_again(times: int) -> None:
    attempt, calls = failing(times, LOST)
    assert _trace_with_retries(attempt, nn.Identity(), []) == "traced"
    assert len(calls) == times + 1


def test_a_constant_that_stays_lost_is_an_error() -> None:
    attempt, calls = failing(3, LOST)
    with pytest.raises(RuntimeError, match="cannot capture"):
        _trace_with_retries(attempt, nn.Identity(), [])
    assert len(calls) == 3


def test_another_failure_is_told_at_once() -> None:
    attempt, calls = failing(1, "a branch on a value")
    with pytest.raises(RuntimeError, match="cannot capture"):
        _trace_with_retries(attempt, nn.Identity(), [])
    assert len(calls) == 1
