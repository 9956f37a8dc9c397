"""Keep the workers of data loaders alive while their parent handles SIGTERM."""

from __future__ import annotations

import atexit
import os
from functools import cache
from mmap import mmap
from types import FrameType

from accelerate.runtime.torch_private import handle_sigterm_in_loader_workers


@cache
def worker_shield(process: int) -> mmap:
    """Return a byte that a process shares with the loader workers it forks: 1 while SIGTERM is not to end them.

    A scheduler that stops a container signals every process of it. Without its workers a loader fails, and the process
    that is about to save fails with it. Workers that were forked before the first call are not shielded.
    """
    shield = mmap(-1, 1)

    def end_unless_shielded(number: int, frame: FrameType | None) -> None:
        if not shield[0] or os.getppid() != process:
            os._exit(0)

    def lower_shield() -> None:
        if os.getpid() == process:
            shield[0] = 0

    handle_sigterm_in_loader_workers(end_unless_shielded)
    # multiprocessing ends its daemons by SIGTERM when the interpreter exits, and waits for them.
    atexit.register(lower_shield)
    return shield
