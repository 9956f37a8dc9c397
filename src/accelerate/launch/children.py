"""The processes below the launcher: none of them may outlive it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, so that they can be found; Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def running(*, direct: bool = False) -> list[psutil.Process]:
    """Return all processes below this one that still run; with `direct` those alone that it started itself."""
    import psutil

    alive = []
    for process in psutil.Process().children(recursive=not direct):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to those that still run."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def end_all(seconds: float = 3.0) -> None:
    """End every process below this one: ask, wait, then kill."""
    import psutil

    left = running()
    if not left:
        return
    send(left, signal.SIGTERM)
    _, left = psutil.wait_procs(left, timeout=seconds)
    send([*left, *running()], signal.SIGKILL)
    psutil.wait_procs(left, timeout=seconds)
