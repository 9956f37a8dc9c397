"""Find the line of the user's program that led into the package."""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[1])


def user_line() -> str:
    """Return `file:line` of the innermost call that is not inside this package."""
    frame = sys._getframe(user_stacklevel() - 1)  # a stack level counts from 1, a frame from 0
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_stacklevel() -> int:
    """Return the `stacklevel` with which a warning by the caller of this names the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
