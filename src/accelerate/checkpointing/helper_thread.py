"""Threads that do a part of their owner's work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class HelperThread:
    """Run functions in the order given.

    The pools of `concurrent.futures` take no work once the interpreter begins to end, and a save may still be running
    then. This thread starts when the object is made and ends when it is closed.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function soon; the future has its result or its exception."""
        future: Future[T] = Future()
        self._jobs.put((future, function))
        return future

    def close(self) -> None:
        """End once everything that was submitted has run."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the owner sees it at `result()`
                future.set_exception(error)
            del job, future, function  # while it waits for the next one, nothing of the last one stays in memory


def run_side_by_side(function: Callable[[T], object], items: Iterable[T], num_threads: int) -> None:
    """Call a function with each item, in several threads, one of which is this one.

    Raises:
        Exception: What the function raised first; items that no thread had begun are left out then.
    """
    waiting, failures = deque(items), deque[BaseException]()

    def work() -> None:
        while not failures:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                function(item)
            except BaseException as error:  # noqa: BLE001 - the caller sees it
                failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
