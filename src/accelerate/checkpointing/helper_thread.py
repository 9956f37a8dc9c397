"""A thread that runs functions one after another while its owner does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
