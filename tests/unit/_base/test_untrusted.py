"""What files of others say: names, JSON, numbers and shapes, and files that have an end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import (
    check_nesting,
    check_regular,
    first_line,
    is_shape,
    is_whole,
    number_in,
    parse_json,
    path_inside,
    read_limited,
    shown,
)

OUTSIDE = ["../x", "a/../../x", "/x", "//server/x", "..\\x", "a\\..\\..\\x", "C:\\x", "C:x", "\\x", "..", "sub/.."]
NO_NAMES = ["", ".", "./", "a\0b", "\ud800", None, 3, ["a"], {}]


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES])
def test_a_name_that_leads_out_or_is_none_is_refused(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^The index names the file .*What a file names must lie in 'folder'"):
        path_inside(Path("folder"), name, "The index")


@pytest.mark.parametrize("name", ["a", "a/b.c", ".hidden/a", "a..b", "...", "a b", "ü", "a\\b", "12:30"])
def test_a_name_that_stays_is_taken(name: str) -> None:
    assert path_inside(Path("folder"), name, "The index") == Path("folder") / name


def test_only_files_with_an_end_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert check_regular(tmp_path / "a").st_size == 5
    assert read_limited(tmp_path / "a", 5) == b"12345"
    with pytest.raises(ConfigurationError, match="has 5 bytes, and a text of up to 4 is expected"):
        read_limited(tmp_path / "a", 4)
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe, a socket or a device"), (tmp_path, "a folder")):
        with pytest.raises(ConfigurationError, match=f"is {kind}, and a file is expected"):
            read_limited(path)
    with pytest.raises(FileNotFoundError):
        read_limited(tmp_path / "none")


def test_json_that_python_does_not_read_is_told() -> None:
    assert parse_json(b'{"a": [1, NaN]}')["a"][0] == 1
    assert parse_json('{"a": 1, "a": 2}', lambda pairs: pairs) == [("a", 1), ("a", 2)]
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse_json("[" * 100_000)
    with pytest.raises(ValueError, match="a number in it has too many digits"):
        parse_json("9" * 5000)
    with pytest.raises(ValueError, match="Expecting value"):
        parse_json("x")


def test_values_that_are_nested_deeply_are_refused() -> None:
    nested: Any = 1
    for _ in range(99):
        nested = {"a": [], "b": nested}
    check_nesting(nested)
    with pytest.raises(ValueError, match="nested too deeply"):
        check_nesting([[nested]])


def test_numbers_are_told_from_what_looks_like_them() -> None:
    assert [is_whole(value) for value in (0, 2**63 - 1, 3)] == [True] * 3
    assert [is_whole(value) for value in (-1, 2**63, True, 1.0, "1", None)] == [False] * 6
    assert is_whole(-1, -1)
    assert [number_in(text) for text in ("12", "007", "0", "000", "1000000000")] == [12, 7, 0, 0, 10**9]
    assert [number_in(text) for text in ("", "-1", "x", "1000000001", "9" * 5000, "0" * 5000 + "x")] == [None] * 6


def test_shapes_are_those_that_a_machine_can_address() -> None:
    assert [is_shape(value) for value in ([], [0], [2, 3], [2**62, 1], [0, 2**62])] == [True] * 5
    assert [is_shape(value) for value in (None, 3, (2,), [-1], [True], [2**32, 2**32], [2**62, 4, 0], [1] * 65)] == [
        False
    ] * 8


def test_values_are_shown_briefly() -> None:
    nested, shared = list[Any](), list[Any]()
    for _ in range(5000):
        nested, shared = [nested], [shared, shared]
    assert shown("a") == "'a'"
    assert shown([1, {"a": (2,)}]) == "[1, {'a': (2,)}]"
    assert shown(nested) == "[[[[[...]]]]]"
    assert len(shown(shared)) < 300
    assert shown(10**5000) == "a value of type int"
    assert len(shown("x" * 10000)) < 300
    assert [first_line(error) for error in (ValueError("a.\nb"), KeyError())] == ["a", "KeyError"]
