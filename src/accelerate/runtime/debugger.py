"""Stop all processes and open the debugger on one of them."""

from __future__ import annotations

import pdb  # noqa: T100 - a debugger is what this module offers
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate.runtime import current, process_group

_POLL_SECONDS = 0.05


class _Prompt(pdb.Pdb):
    """A debugger that tells when its first prompt was left."""

    def __init__(self, left: Callable[[], None]) -> None:
        super().__init__()
        self._left: Callable[[], None] | None = left

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Talk to the user, then tell it the first time."""
        super().interaction(*args, **kwargs)
        if self._left is not None:
            self._left()
            self._left = None


def stop(frame: FrameType, rank: int) -> None:
    """Open the debugger in `frame` on one rank, and keep the others waiting until it goes on.

    They wait at the store where the ranks met: a collective would run into its time limit.

    Raises:
        ConfigurationError: If there is no such rank.
    """
    runtime = current.runtime()
    if not 0 <= rank < runtime.world_size:
        raise ConfigurationError(
            f"breakpoint(rank={rank!r}) was called in a run of {runtime.world_size} process(es), so all would wait for "
            f"a debugger that nobody opens. Write a rank from 0 to {runtime.world_size - 1}."
        )
    if not runtime.is_distributed:
        pdb.Pdb().set_trace(frame)
        return
    store = process_group.store()
    key = f"accelerate/breakpoint/{current.next_number('breakpoint')}"
    if runtime.rank == rank:
        _Prompt(lambda: store.set(key, "left")).set_trace(frame)
        return
    while not store.check([key]):
        time.sleep(_POLL_SECONDS)
