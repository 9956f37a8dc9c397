"""Turn the signals by which schedulers ask a run to end into one answer for all processes, at one step."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import Store

from accelerate._base.constants import STOP_FOLDER
from accelerate._base.errors import UsageError
from accelerate._base.helpers import warn_once
from accelerate.config import env
from accelerate.runtime import current, process_group
from accelerate.runtime.loader_workers import worker_shield

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
# The store answers one request at a time; this leaves it 1,000 a second however many ranks ask.
_POLL_SECONDS_A_RANK = 0.001
_SECONDS_TO_ANSWER = 60.0
_SECONDS_TO_LEAVE = 5.0
SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Listen for SIGTERM and SIGUSR1, and return at each step whether all processes stop.

    Until it is started, it only keeps SIGUSR1 from ending the process: a scheduler may send it before the first step.
    Handlers that were there before are called too. The launcher learns that this process listens, so that it hands
    signals on and waits, instead of ending everything.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Handler] = {}
        self._notice: Path | None = None
        self._agreement: Agreement | None = None
        self._is_started = False
        self._is_noting = False
        if threading.current_thread() is threading.main_thread():
            self._listen_for(SIGNALS[1:])

    def start(self) -> Preemption:
        """Begin to agree with the other processes, and return this object; further calls do nothing."""
        if self._is_started:
            return self
        self._is_started = True
        if threading.current_thread() is threading.main_thread():
            self._listen_for(SIGNALS)
            self._notice = _announce()
            worker_shield(self._process)[0] = 1
        else:
            warn_once(
                "accelerator.should_stop was first read outside of the main thread, where Python cannot install signal "
                "handlers: this process only learns of those that other processes get. Read it once in the main thread.",
                stacklevel=5,
            )
        runtime = current.runtime()
        self._rank = runtime.rank
        if runtime.is_distributed:
            number = current.next_number("preemption")
            self._agreement = Agreement(
                process_group.store(), runtime.rank, runtime.world_size, self._stop_reason, f"preemption/{number}"
            )
        return self

    @property
    def wants_to_stop(self) -> bool:
        """Whether this process got a signal."""
        return self._received is not None

    def is_reached(self, step: int) -> bool:
        """Return whether all processes stop at this step; each asks at the same steps."""
        if self._agreement is not None:
            return self._agreement.is_reached(step)
        return self._received is not None

    def stop_at(self, step: int) -> None:
        """Stop at this step, as all processes have agreed by other means."""
        if self._agreement is not None:
            self._agreement.decide_here(step)
        self._received = self._received or SIGNALS[0]

    def close(self) -> None:
        """Put the handlers back that were there before, and let the launcher end this process as any other."""
        if self._agreement is not None:
            self._agreement.close()
        if self._notice is not None:
            self._notice.unlink(missing_ok=True)
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                # The program may have replaced our handler.
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL if before is None else before)
                    if number == signal.SIGTERM:
                        worker_shield(self._process)[0] = 0
        self._before.clear()

    def _listen_for(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            if signal.getsignal(number) != self._note:
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A process that was forked from this one, such as a worker of a loader, ends at SIGTERM; a request
            # for the whole group is not meant for it.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._received = signal.Signals(number)
        before = self._before.get(signal.Signals(number))
        # A handler that the program installed after ours may call ours in turn.
        if callable(before) and not self._is_noting:
            self._is_noting = True
            try:
                before(number, frame)
            finally:
                self._is_noting = False

    def _stop_reason(self) -> str | None:
        received = self._received
        return None if received is None else f"Rank {self._rank} got {received.name}"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Signals and threads belong to this process: elsewhere nobody listens yet.
        return type(None), ()


class Agreement:
    """One decision of all ranks, made through the store where they met.

    A thread of every rank looks into the store. A rank that wants to stop writes so; the thread of each rank then
    notes the last step at which its program was let go on, and from there on its program gets no answer
    before the decision is known. The last thread to note decides: one step after the latest of these. So no rank has
    passed the step that was decided, all reach it, and a rank that is busy elsewhere holds nobody up, because its
    thread answers for it.

    Args:
        store: The key-value store of the process group.
        stop_reason: Returns why this rank wants to stop, None while it does not.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, stop_reason: Callable[[], str | None], name: str
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._stop_reason = stop_reason
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
            was_answered = step <= self._last
            self._last = max(step, self._last)
            # An answer for a step stays the same: an evaluation that asks again does not wait for the others.
            if not self._is_open or was_answered:
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
            reason = self._stop_reason()
            if reason is not None:
                store.set(self._key("reason"), reason)
            elif not store.check([self._key("reason")]):
                return
            self._is_open = True
            store.set(self._key(f"last/{self._rank}"), str(self._last))
            if int(store.add(self._key("answers"), 1)) == self._world_size:
                steps = [int(store.get(self._key(f"last/{rank}"))) for rank in range(self._world_size)]
                store.set(self._key("step"), str(max(steps) + 1))
        if store.check([self._key("step")]):
            step = int(store.get(self._key("step")))
            if self._rank == 0:
                reason = store.get(self._key("reason")).decode()
                _LOG.warning("%s: all processes stop at step %d.", reason, step)
            self._decided = step
            self._settled.set()

    def _await_decision(self) -> None:
        if self._settled.wait(_SECONDS_TO_ANSWER):
            return
        missing = []
        with suppress(RuntimeError):
            missing = [r for r in range(self._world_size) if not self._store.check([self._key(f"last/{r}")])]
        raise UsageError(
            f"This process is to stop and waited {_SECONDS_TO_ANSWER:.0f} s for rank(s) {missing}, which have not read "
            "`accelerator.should_stop` or are gone. Every process must read it, at the same steps."
        )


def ignore_signals() -> None:
    """Let the signals pass by, in a process that is on its way out."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def _announce() -> Path | None:
    """Tell the launcher of this process, if it asks to know, that it listens."""
    folder = env.get(STOP_FOLDER)
    if not folder:
        return None
    notice = Path(folder) / f"{os.getpid()}"
    with suppress(OSError):
        notice.touch()
        return notice
    return None
