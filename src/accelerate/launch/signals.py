"""What happens when the launcher itself is told to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from accelerate.launch import children

if TYPE_CHECKING:
    import psutil

_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
# Asks a run to save and end while there is time; it ends no launcher by itself.
_NOTICE = getattr(signal, "SIGUSR1", None)
HANDLED = (*_ENDING, *([_NOTICE] if _NOTICE is not None else []))
# A worker that waits inside a collective never sees Ctrl-C; after this time it is told in a way it cannot miss.
SECONDS_AFTER_INTERRUPT = 5.0


class Stop:
    """The first signal the launcher got. A second one ends the workers at once.

    Workers that listen for SIGTERM get it handed on and the time to save; the run then ends by itself. Without such
    workers it is ended.

    Args:
        seconds_to_end: How long workers may take.
        listeners: Returns the workers that listen.
        requested: Is called when they are asked to save and end.
    """

    def __init__(
        self,
        seconds_to_end: float,
        listeners: Callable[[], list[psutil.Process]] = list,
        requested: Callable[[], None] = lambda: None,
    ) -> None:
        self.seconds_to_end = seconds_to_end
        self.number: signal.Signals | None = None
        self.ended = threading.Event()
        self._listeners = listeners
        self._requested = requested

    @property
    def exit_code(self) -> int | None:
        """The exit code a shell expects of a program that a signal ended."""
        return None if self.number is None else 128 + self.number

    def take(self, number: signal.Signals) -> bool:
        """Note a signal and return whether it ends the run here and now."""
        if number == _NOTICE:
            listeners = self._listeners()
            if listeners:
                self._requested()
            children.send(listeners or children.running(direct=True), number)
            return False
        if self.number is not None:
            children.send(children.running(), signal.SIGKILL)
            return False
        self.number = number
        listeners = self._listeners() if number == signal.SIGTERM else []
        what = "ending the workers"
        if listeners:
            what = f"the workers have {self.seconds_to_end:g} s to save and end"
        sys.stderr.write(f"accelerate launch: {number.name}, {what}; again ends them at once\n")
        if listeners:
            self._requested()
            children.send(listeners, number)
        threading.Thread(target=self._insist, daemon=True).start()
        return not listeners

    def _insist(self) -> None:
        """Go from a request to a kill for workers that do not end."""
        seconds = self.seconds_to_end
        if self.number == signal.SIGINT:
            seconds = SECONDS_AFTER_INTERRUPT
            if self.ended.wait(seconds):
                return
            children.send(children.running(), signal.SIGTERM)
        if not self.ended.wait(seconds):
            children.send(children.running(), signal.SIGKILL)


@contextlib.contextmanager
def handled(stop: Stop, raised: Callable[[signal.Signals], BaseException]) -> Iterator[None]:
    """Inside the block, turn the first signal into an exception of the main thread.

    Args:
        raised: Makes the exception from the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if stop.take(signal.Signals(number)):
            raise raised(signal.Signals(number))

    # What is ignored stays so: `nohup` asks to live on, and a shell keeps Ctrl-C from what it runs in the background.
    heard = [number for number in HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        stop.ended.set()
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
