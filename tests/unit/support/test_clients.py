"""The comparison of client programs sees every value that differs, and takes a reason only for what it is about."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.clients import DIFFERENCES, PROGRAMS, compare, read_recorded

DIGITS = next(program for program in PROGRAMS if program.name == "trainer_digits")
LOOP = next(program for program in PROGRAMS if program.name == "no_trainer")


def test_what_is_recorded_is_equal_to_itself() -> None:
    for program in PROGRAMS:
        for processes in program.processes:
            recorded = read_recorded(program, processes)
            comparison = compare(program, processes, recorded, recorded)
            assert comparison.equal > 20
            assert (comparison.close, comparison.explained, comparison.unexplained) == (0, {}, {})


@pytest.mark.parametrize(
    ("found", "path"),
    [
        ({"loss": [1.0, 2.001], "files": ["a"], "steps": 3}, "loss/1"),
        ({"loss": [1.0], "files": ["a"], "steps": 3}, "loss/length"),
        ({"loss": [1.0, 2.0], "files": [], "steps": 3}, "files/a"),
        ({"loss": [1.0, 2.0], "files": ["a", "b"], "steps": 3}, "files/b"),
        ({"loss": [1.0, 2.0], "files": ["a"], "steps": 4}, "steps"),
        ({"loss": [1.0, 2.0], "files": ["a"]}, "steps"),
        ({"loss": [1.0, 2.0], "files": ["a"], "steps": "3"}, "steps"),
    ],
)
def test_a_value_that_differs_is_named(found: dict[str, Any], path: str) -> None:
    recorded = {"loss": [1.0, 2.0], "files": ["a"], "steps": 3}
    assert path in compare(DIGITS, 1, found, recorded).unexplained


def test_rounding_and_files_of_our_own_do_not_count() -> None:
    recorded = {"loss": [2.0], "files": ["b", "a"]}
    comparison = compare(DIGITS, 1, {"loss": [2.0 + 1e-6], "files": ["a", "run/manifest.json", "b"]}, recorded)
    assert (comparison.equal, comparison.close, comparison.unexplained) == (3, 1, {})
    assert comparison.largest == pytest.approx(5e-7, rel=1e-3)


def test_a_reason_is_taken_for_its_program_its_processes_and_its_values_alone() -> None:
    found, recorded = {"resumed": {"losses": [1.0]}}, {"resumed": {"losses": [2.0]}}
    (reason,) = compare(LOOP, 1, found, recorded).explained
    assert reason in DIFFERENCES
    assert compare(DIGITS, 1, found, recorded).unexplained == {"resumed/losses/0": (1.0, 2.0)}
    assert compare(LOOP, 3, found, recorded).unexplained == {"resumed/losses/0": (1.0, 2.0)}
    assert list(compare(LOOP, 1, {"straight": 1}, {"straight": 2}).unexplained) == ["straight"]
