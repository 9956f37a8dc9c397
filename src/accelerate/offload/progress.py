"""A bar for work on many weights, shown to a person and by one process of a machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate._base.imports import require
from accelerate.runtime import current


def _is_watched() -> bool:
    """Return whether somebody sees a bar: on a terminal or in a notebook, and not once for each process."""
    runtime = current.active()
    if runtime is not None and runtime.local_rank != 0:
        return False
    return "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


@contextmanager
def progress(total: int, description: str, unit: str = "file") -> Iterator[Callable[[int], object]]:
    """Show how far some work is; the block calls what it gets with the amount that it has just done.

    Args:
        unit: `"B"` for bytes, which are shown in thousands, millions and so on.
    """
    if not _is_watched():
        yield lambda done: None
        return
    bars = require("tqdm.auto", why="A progress bar")
    with bars.tqdm(total=total, desc=description, unit=unit, unit_scale=unit == "B") as bar:
        yield bar.update
