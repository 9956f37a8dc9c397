"""A message is shown once a process, at the line of the caller's caller."""

from __future__ import annotations

import warnings

import pytest

from accelerate._base import warn_once as module
from accelerate._base.warn_once import warn_once


@pytest.fixture(autouse=True)
def _fresh_memory() -> None:
    module.reset()


def _caller() -> None:
    warn_once("the same words")


def _caller_thrice() -> None:
    for _ in range(3):
        _caller()


def test_once_until_reset() -> None:
    with pytest.warns(UserWarning, match="the same words") as seen:
        _caller_thrice()
    assert len(seen) == 1
    module.reset()
    with pytest.warns(UserWarning, match="the same words"):
        _caller()


def test_the_warning_names_this_file_and_the_line_of_the_call() -> None:
    with pytest.warns(UserWarning, match="the same words") as seen:
        _caller()
    assert seen[0].filename == __file__
    line = _caller.__code__.co_firstlineno
    assert seen[0].lineno > line + 1, "the line inside the helper was named, not the one that called it"


def test_other_words_and_categories_show() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn_once("one")
        warn_once("two", FutureWarning)
    assert [entry.category for entry in seen] == [UserWarning, FutureWarning]
