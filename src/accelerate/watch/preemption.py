"""Turn the signals by which schedulers ask a run to end into one answer for all processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate._base.constants import STOP_FOLDER
from accelerate._base.helpers import warn_once
from accelerate.config import env
from accelerate.runtime import current, process_group
from accelerate.watch.agreement import Agreement

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Listen for SIGTERM and SIGUSR1, and say at each step whether all processes are to stop.

    Handlers that were there before are called too. The launcher is told that this process listens, so that it hands
    signals on and waits, instead of ending everything.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Handler] = {}
        self._notice = _announce() if self._listen() else None
        runtime = current.runtime()
        self._rank = runtime.rank
        self._agreement: Agreement | None = None
        if runtime.is_distributed:
            number = current.next_number("preemption")
            self._agreement = Agreement(
                process_group.store(), runtime.rank, runtime.world_size, self._wish, f"preemption/{number}"
            )

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
                # Somebody else may have put a handler in the place of ours.
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def _listen(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            warn_once(
                "accelerator.should_stop was first read outside of the main thread, where Python lets nobody listen for "
                "signals: this process only learns of those that other processes get. Read it once in the main thread.",
                stacklevel=5,
            )
            return False
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A process that was forked from this one, such as a worker of a loader, ends when it is told to; a request
            # for the whole group is not meant for it.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._received = signal.Signals(number)
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)

    def _wish(self) -> str | None:
        received = self._received
        return None if received is None else f"Rank {self._rank} got {received.name}"

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Signals and threads belong to this process: elsewhere nobody listens yet.
        return type(None), ()


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
