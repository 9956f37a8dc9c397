"""The line of a notebook that is running, to be named when it turns out to have been too early."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1])
_CELL_MARKS = ("ipykernel_", "<ipython-input")


def find() -> str | None:
    """Return the running line of a cell; None outside an interactive kernel, where nobody asks for it."""
    if "ipykernel" not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    through = ""
    while frame is not None:
        place = frame.f_code.co_filename
        if any(mark in place for mark in _CELL_MARKS):
            source = linecache.getline(place, frame.f_lineno).strip()
            return f"line {frame.f_lineno} of a cell, `{source}`{through}"
        if not through and not place.startswith(_PACKAGE):
            through = f" (through {Path(place).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return None
