"""Agree on the step after which all processes stop, beside the collectives of the training."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from torch._C._distributed_c10d import Store

from accelerate._base.errors import UsageError

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
# The store answers one request at a time; this leaves it 1,000 a second however many ranks ask.
_POLL_SECONDS_A_RANK = 0.001
_SECONDS_TO_ANSWER = 60.0
_SECONDS_TO_LEAVE = 5.0


class Agreement:
    """One decision of all ranks, made through the store where they met.

    A thread of every rank looks into the store. A rank that wants to stop writes so; the thread of each rank then
    notes the last step to which its program was told to go on, and from there on its program is told nothing more
    before the decision is known. The last thread to note decides: one step after the latest of these. So no rank has
    passed the step that was decided, all reach it, and a rank that is busy elsewhere holds nobody up, because its
    thread answers for it.

    Args:
        store: The key-value store of the process group.
        wish: Why this rank wants to stop, None while it does not.
    """

    def __init__(self, store: Store, rank: int, world_size: int, wish: Callable[[], str | None], name: str) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._wish = wish
        self._name = name
        self._interval = max(_POLL_SECONDS, world_size * _POLL_SECONDS_A_RANK)
        # Both are written by one thread and read by the other, each its own first, so that one of them sees the other.
        self._last = -1
        self._is_open = False
        self._decided: int | None = None
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="accelerate-preemption", daemon=True)
        self._thread.start()
        # A thread inside the store while the interpreter goes down would abort the process.
        atexit.register(self.close)

    def is_reached(self, step: int) -> bool:
        """Return whether this step is the decided one or a later one.

        Raises:
            UsageError: If a rank takes no part in the decision.
        """
        if self._decided is None:
            was_told = step <= self._last
            self._last = max(step, self._last)
            # What was said of a step once stays so: an evaluation that asks again does not wait for the others.
            if not self._is_open or was_told:
                return False
            self._await_decision()
        return self._decided is not None and step >= self._decided

    def decide_here(self, step: int) -> None:
        """Stop at this step; all ranks must call it with the same."""
        self._decided = step
        self.close()

    def close(self) -> None:
        """Stop looking into the store."""
        atexit.unregister(self.close)
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_SECONDS_TO_LEAVE)

    def _key(self, word: str) -> str:
        return f"accelerate/{self._name}/{word}"

    def _watch(self) -> None:
        # The store is gone when the process that holds it is; the program learns of that by its own means.
        with suppress(RuntimeError):
            while not self._closing.wait(self._interval) and self._decided is None:
                self._look()
        self._settled.set()

    def _look(self) -> None:
        store = self._store
        if not self._is_open:
            wish = self._wish()
            if wish is not None:
                store.set(self._key("wish"), wish)
            elif not store.check([self._key("wish")]):
                return
            self._is_open = True
            store.set(self._key(f"told/{self._rank}"), str(self._last))
            if int(store.add(self._key("answers"), 1)) == self._world_size:
                told = [int(store.get(self._key(f"told/{rank}"))) for rank in range(self._world_size)]
                store.set(self._key("step"), str(max(told) + 1))
        if store.check([self._key("step")]):
            step = int(store.get(self._key("step")))
            if self._rank == 0:
                why = store.get(self._key("wish")).decode()
                _LOG.warning("%s: all processes stop at step %d.", why, step)
            self._decided = step
            self._settled.set()

    def _await_decision(self) -> None:
        if self._settled.wait(_SECONDS_TO_ANSWER):
            return
        missing = []
        with suppress(RuntimeError):
            missing = [r for r in range(self._world_size) if not self._store.check([self._key(f"told/{r}")])]
        raise UsageError(
            f"This process is to stop and waited {_SECONDS_TO_ANSWER:.0f} s for rank(s) {missing}, which have not read "
            "`accelerator.should_stop` or are gone. Every process must read it, at the same steps."
        )
