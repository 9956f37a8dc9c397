"""One bar for many processes."""

from __future__ import annotations

import io

import pytest
from tests.support.processes import run_group

from accelerate._base.errors import ConfigurationError
from accelerate.utils import tqdm


def _bars() -> tuple[str, str, str]:
    shown = []
    for kwargs in ({}, {"main_process_only": False}, {"disable": True}):
        screen = io.StringIO()
        assert list(tqdm(range(3), desc="epoch", file=screen, **kwargs)) == [0, 1, 2]  # type: ignore[arg-type]
        shown.append(screen.getvalue())
    return shown[0], shown[1], shown[2]


@pytest.mark.multiprocess
def test_only_the_first_process_shows_the_bar() -> None:
    first, second = run_group(_bars, 2)
    assert "epoch: 100%" in first[0]
    assert second[0] == ""
    assert "epoch: 100%" in first[1]
    assert "epoch: 100%" in second[1]
    assert first[2] == second[2] == ""


def test_alone_there_is_a_bar() -> None:
    assert "epoch: 100%" in _bars()[0]


def test_a_bool_in_first_place_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="main_process_only=True"):
        tqdm(True, range(3))
