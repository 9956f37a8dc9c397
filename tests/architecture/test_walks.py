"""Requests pass through no more files than they may, and the architecture page shows the recorded ways."""

from __future__ import annotations

import sys
from functools import cache

import pytest
from tools import record_walks
from tools.pages import write_sections

pytestmark = [
    pytest.mark.multiprocess,  # a launcher and its workers run
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not name the class of a method"),
]


@cache
def walks() -> dict[str, record_walks.Walk]:
    return record_walks.record_all()


@pytest.mark.parametrize("name", record_walks.GUIDES)
def test_a_walk_is_not_too_long(name: str) -> None:
    assert [
        problem for problem in record_walks.too_long(walks()) if problem.startswith(record_walks.GUIDES[name].heading)
    ] == []


def test_the_page_shows_what_was_recorded() -> None:
    stale = write_sections((record_walks.PAGE,), "walks", record_walks.render(walks()), check=True)
    assert stale == [], "run `make walks`"


def test_two_recordings_are_the_same() -> None:
    assert record_walks.record("big_model") | record_walks.record("train") == {
        name: walk for name, walk in walks().items() if name != "launch"
    }
