"""A function in a process for each XLA device of this machine, started by torch_xla, with a record of how each ended."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from accelerate._base.constants import PREEMPTED_EXIT_CODE, PREEMPTED_FILE
from accelerate.launch.failure import (
    EXIT_CODE_FILE,
    PROCESS_FILE,
    exit_code_of,
    read_failures,
    read_process,
)
from accelerate.launch.worker import end_with_parent, run_recorded

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_AFTER_TERMINATE = 5.0


@contextlib.contextmanager
def record_folder(path: str | None) -> Iterator[Path]:
    """Give the folder for the records of processes: the named one, else one that is gone after the block."""
    if path is not None:
        Path(path).mkdir(parents=True, exist_ok=True)
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="accelerate-") as folder:
        yield Path(folder)


def run_on_all_devices(function: Callable[[int], object], folder: Path, *, start_method: str = "spawn") -> int:
    """Call a function in a process for each device, wait for all, and return the exit code of the run.

    A process that fails ends the others, which would wait for it; `failure.read_failures` tells of all of them.

    Args:
        function: Takes the index of the process; it is sent there by pickling.
        folder: Where the processes leave their records.

    Raises:
        BrokenProcessPool: A process ended, and neither it nor the system says how.
    """
    torch_xla: Any = import_module("torch_xla")
    with _watched_children() as children, _interruptible():
        try:
            torch_xla.launch(RecordedFunction(function, str(folder)), start_method=start_method)
        except BrokenProcessPool:
            broken = True
        else:
            broken = False
    if not broken:
        return PREEMPTED_EXIT_CODE if (folder / PREEMPTED_FILE).exists() else 0
    _note_exit_codes(folder, children)
    failures, _ = read_failures(folder)
    if not failures:
        raise BrokenProcessPool("A process of torch_xla ended before it began, and left no record of why.")
    return exit_code_of(failures)


class RecordedFunction:
    """A function for one process of torch_xla, which ends at once where it fails.

    Args:
        folder: Where each process has a folder for its records.
    """

    def __init__(self, function: Callable[[int], object], folder: str) -> None:
        self.function = function
        self.folder = folder

    def __call__(self, index: int) -> None:
        """Call the function as the process with this index, which is its rank over all machines."""
        folder = Path(self.folder) / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        runtime: Any = import_module("torch_xla.runtime")
        ranks = {"local_rank": int(runtime.local_ordinal()), "world_size": int(runtime.world_size())}
        (folder / PROCESS_FILE).write_text(json.dumps({"pid": os.getpid(), **ranks}))
        end_with_parent()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)  # lines of several processes appear when they are written
        try:
            run_recorded(lambda: self.function(index), folder / "error.json")
        except SystemExit as error:
            self._exit(error.code)

    def _exit(self, code: object) -> None:
        if code == PREEMPTED_EXIT_CODE:
            (Path(self.folder) / PREEMPTED_FILE).touch()  # the others end by themselves, too
            return
        if code in (None, 0):
            return
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by an exception: torch_xla would wait for the other processes, which wait for this one in a collective.
        os._exit(code & 0xFF)


# --- processes --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _watched_children() -> Iterator[set[Any]]:
    """Give the set of processes that are started inside the block; where one of them fails, the others are ended.

    The pool of Python that torch_xla uses does so, too, unless the one that failed was started while the pool began to
    wait (Python 3.11): then it waits for ever.
    """
    before = set(multiprocessing.active_children())
    found: set[Any] = set()
    ended = threading.Event()

    def look() -> None:
        patience = _SECONDS_AFTER_TERMINATE
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            found.update(set(multiprocessing.active_children()) - before)
            if any(child.exitcode for child in found):
                for child in [child for child in found if child.exitcode is None]:
                    child.terminate() if patience > 0 else child.kill()
                patience -= _SECONDS_BETWEEN_LOOKS

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C and a notebook's stop button end the processes, for which torch_xla would wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = set(multiprocessing.active_children())

    def handler(number: int, frame: FrameType | None) -> None:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


def _note_exit_codes(folder: Path, children: set[Any]) -> None:
    """Write beside the records how the processes ended, for those that had no time to do so."""
    codes = {child.pid: child.exitcode for child in children}
    for process in folder.glob(f"*/{PROCESS_FILE}"):
        code = codes.get(read_process(process).get("pid"))
        if code:
            process.with_name(EXIT_CODE_FILE).write_text(str(code))
