"""Small pure helpers."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate._base.ports import get_free_port, is_port_in_use
from accelerate._base.text import convert_bytes, get_pretty_name, merge_dicts, recursive_getattr


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


def test_ports() -> None:
    port = get_free_port()
    assert not is_port_in_use(port)
    assert port < 32_768, "the system hands out the ports from there on to any connection"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert is_port_in_use(listener.getsockname()[1])
