"""Options of the tests that kill."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--killed-runs", type=int, default=4, help="runs that are killed five times each; 40 make the full 200 moments"
    )
