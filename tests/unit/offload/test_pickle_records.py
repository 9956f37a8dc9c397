"""Pickles as records: plain values are read as they are, and nothing else is made."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest

from accelerate.offload.pickle_records import Record, RecordUnpickler


def read(instructions: bytes) -> Any:
    return RecordUnpickler(io.BytesIO(b"\x80\x04" + instructions + b"."), len(instructions)).load()


def test_sets_are_read() -> None:
    assert read(b"\x8f(K\x01K\x02N\x90") == {1, 2, None}


def test_an_object_is_a_record_of_what_would_make_it() -> None:
    found = read(b"cos\nsystem\n(X\x02\x00\x00\x00lstR}X\x01\x00\x00\x00aK\x07sb")
    assert isinstance(found, Record)
    assert (found.name, found.args, found.state) == ("os.system", ("ls",), {"a": 7})
    assert found.is_a("system")
    assert found.field("a", int) == 7
    for name, kind in (("a", str), ("b", int)):
        with pytest.raises(TypeError, match=f"'{name}' is a"):
            found.field(name, kind)


@pytest.mark.parametrize(
    ("instructions", "why"),
    [
        (b"\x8f(]\x90", "a key of a dictionary is a list"),
        (b"](N\x90", "it adds to a list"),
        (b"K\x01Q", "it names an object outside of it"),
        (b"}}b", "it gives a state to a dict"),
    ],
)
def test_what_no_file_needs_is_refused(instructions: bytes, why: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=why):
        read(instructions)
