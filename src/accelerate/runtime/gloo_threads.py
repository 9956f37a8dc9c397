"""Wait until the threads of gloo groups have put down what they worked on.

Such a thread frees the tensors of a collective shortly after the collective is over, and needs the interpreter for that.
If the interpreter is gone by then, the process aborts ("terminate called without an active exception"); if it waits
for that thread, as it does when a DDP model goes that was the last to hold the group, both wait for ever. torch 2.13
sees to neither.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_SLEEPING = "S"
_PAUSE = 0.001
_PATIENCE = 5.0


def activity() -> dict[str, tuple[str, str]]:
    """Return the state of each thread and how often it went to sleep; empty where the system does not say."""
    found = {}
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        # A thread may end while it is looked at.
        with suppress(OSError):
            if (task / "comm").read_text().strip() == _NAME:
                fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
                found[task.name] = (fields["State"].split()[0], fields["voluntary_ctxt_switches"].strip())
    return found


def settle() -> None:
    """Return once no thread of a gloo group is at work, or after a few seconds."""
    deadline = time.monotonic() + _PATIENCE
    before = activity()
    while time.monotonic() < deadline:
        time.sleep(_PAUSE)  # lets go of the interpreter: whoever waits for it wakes up, and is seen to
        now = activity()
        if now == before and all(state == _SLEEPING for state, _ in now.values()):
            return
        before = now
