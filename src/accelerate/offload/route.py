"""The order in which the modules of a model run: known from its tree at first, then learned while it runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_THREADS = 64


class Route:
    """Foresee which stop comes next.

    A stop is the number of a module whose weights are fetched. What followed the same two stops the last time is
    expected again, then what followed the last stop, then what follows it in the tree: so a module that is used twice in
    a pass, each time before another one, is foreseen rightly both times.
    """

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._after_two: dict[tuple[int | None, int], int] = {}
        self._last: dict[int, tuple[int | None, int]] = {}
        self._ahead: deque[int] = deque()
        self._end: tuple[int | None, int] | None = None
        self.length = 0

    def extend(self) -> int:
        """Add a stop behind the last one of the tree, and return its number."""
        number = self.length
        if number:
            self._after[number - 1] = number
        self._after[number] = 0  # after a pass comes the next one
        self.length += 1
        return number

    def visit(self, stop: int) -> bool:
        """Note that this thread runs a stop now, and return whether that was foreseen."""
        thread = threading.get_ident()
        before = self._last.get(thread)
        if before is None and len(self._last) > _THREADS:
            self._last.clear()
        if before is not None:
            self._after[before[1]] = stop
            self._after_two[before] = stop
        now = (None if before is None else before[1], stop)
        self._last[thread] = now
        foreseen = bool(self._ahead) and self._ahead[0] == stop
        if foreseen:
            self._ahead.popleft()
        else:
            self._ahead.clear()
        if not self._ahead:
            self._end = now
        return foreseen

    @property
    def ahead(self) -> int:
        """How many stops from here were asked for by `look_ahead`."""
        return len(self._ahead)

    def look_ahead(self, wanted: Callable[[int], bool]) -> None:
        """Go through the stops that come next and were not yet asked for, until `wanted` says no to one."""
        while self._end is not None and len(self._ahead) < self.length:
            following = self._after_two.get(self._end, self._after.get(self._end[1]))
            if following is None or not wanted(following):
                return
            self._ahead.append(following)
            self._end = (self._end[1], following)
