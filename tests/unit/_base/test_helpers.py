"""Small helpers: text, nested dictionaries, and warnings that are shown once."""

from __future__ import annotations

import socket
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.logs import logged

from accelerate._base import helpers
from accelerate._base.helpers import convert_bytes, get_pretty_name, merge_dicts, recursive_getattr, warn_once


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KB"),
        (1536, "1.5 KB"),
        (5 * 1024**3, "5.0 GB"),
        (2**60, "1024.0 PB"),
    ],
)
def test_convert_bytes(size: int, expected: str) -> None:
    assert convert_bytes(size) == expected


def test_pretty_names() -> None:
    assert get_pretty_name(socket.socket) == "socket"
    assert get_pretty_name(3) == "int"
    assert get_pretty_name(convert_bytes) == "convert_bytes"


def test_merge_goes_deep_and_returns_the_destination() -> None:
    destination = {"a": {"x": 1, "y": 2}, "b": 3}
    merged = merge_dicts({"a": {"x": 10, "z": {"w": 5}}, "c": 4}, destination)
    assert merged is destination
    assert merged == {"a": {"x": 10, "y": 2, "z": {"w": 5}}, "b": 3, "c": 4}


def test_merge_replaces_a_value_by_a_dictionary() -> None:
    assert merge_dicts({"a": {"x": 1}}, {"a": 5}) == {"a": {"x": 1}}


tree = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
dictionary = st.dictionaries(st.sampled_from("abc"), tree, max_size=3)


@given(dictionary)
def test_merging_into_nothing_copies(source: dict[str, object]) -> None:
    assert merge_dicts(source, {}) == source


def test_recursive_getattr() -> None:
    import os

    assert recursive_getattr(os, "path.join") is os.path.join
    with pytest.raises(AttributeError):
        recursive_getattr(os, "path.nonsense")


@pytest.fixture(autouse=True)
def _fresh_memory() -> None:
    helpers.reset_warnings()


def _caller() -> None:
    warn_once("the same words")


def _caller_thrice() -> None:
    for _ in range(3):
        _caller()


def test_once_until_reset() -> None:
    with pytest.warns(UserWarning, match="the same words") as seen:
        _caller_thrice()
    assert len(seen) == 1
    helpers.reset_warnings()
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


@pytest.mark.parametrize(
    ("system", "release", "warns"),
    [
        ("Linux", "4.19.0-25-amd64", True),
        ("Linux", "5.5.0", False),
        ("Linux", "6.1.0+deb12", False),
        ("Linux", "vendor", False),
        ("Darwin", "4.0", False),
    ],
)
def test_an_old_kernel_is_named(monkeypatch: pytest.MonkeyPatch, system: str, release: str, warns: bool) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.release", lambda: release)
    with logged("This machine runs Linux kernel 4.19.0;", times=int(warns)) as said:
        helpers.check_os_kernel()
    assert len(said) == warns


def test_a_choice_shows_its_reason() -> None:
    assert str(helpers.Choice("bf16", "it was asked for")) == "bf16 (it was asked for)"
