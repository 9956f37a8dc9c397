"""Run processes below the launcher: start commands, hand signals on, report a failure, leave no process behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO

import psutil

from accelerate._base.constants import PREEMPTED_EXIT_CODE, PREEMPTED_FILE, STOP_FOLDER
from accelerate.config import conflicts, env
from accelerate.launch.failure import OutOfMemoryKills, read_failures, report
from accelerate.launch.plan import LaunchPlan

_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
# Asks a run to save and end while there is time; it ends no launcher by itself.
_NOTICE = getattr(signal, "SIGUSR1", None)
# What schedulers send, now and then more than once.
_REQUESTS = (signal.SIGTERM, *([_NOTICE] if _NOTICE is not None else []))
# A worker that waits inside a collective never sees Ctrl-C; after this time it is told in a way it cannot miss.
_SECONDS_AFTER_INTERRUPT = 5.0
_SECONDS_AFTER_TERMINATE = 3.0
_SECONDS_BETWEEN_LOOKS = 0.1
_FOLDER_PREFIX = "accelerate-launch-"
_LOCK_FILE = "lock"


# --- children ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launch_folder(files: Mapping[str, str]) -> Iterator[str]:
    """Make a folder with the files of a launch; after the block it is gone, and every process that was started.

    What this program had started before is its own, as is what that starts: it lives on.
    """
    started = StartedProcesses()
    _remove_abandoned()
    with _locked_folder() as folder:
        for name, content in files.items():
            Path(folder, name).write_text(content)
        _adopt_orphans()
        try:
            yield folder
        finally:
            started.end()


@contextlib.contextmanager
def _locked_folder() -> Iterator[str]:
    """Make a temporary folder with a lock that the kernel releases when this process dies."""
    made = tempfile.mkdtemp(prefix="accelerate-new-")
    # Under its final name the folder is always locked: a lock that is free tells that its launcher is gone.
    folder = made.replace("accelerate-new-", _FOLDER_PREFIX)
    lock = os.open(Path(made, _LOCK_FILE), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            _lock(lock)
        Path(made).rename(folder)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def _lock(descriptor: int) -> None:
    if sys.platform == "win32":
        raise OSError("Windows has no such locks")
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_abandoned() -> None:
    """Remove the folders of launchers that were killed."""
    for entry in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        # Skip folders of other users, and those that another launch has just removed.
        with contextlib.suppress(OSError):
            if entry.is_symlink() or entry.stat().st_uid != os.getuid():
                continue
            lock = os.open(entry / _LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                _lock(lock)
                shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(lock)


def _adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, so that they can be found; Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def _send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class StartedProcesses:
    """The processes below this one that have been started since this object was made, and those that they started."""

    def __init__(self) -> None:
        # Launching may be one thing of many that a program does: it has a server of trackers, or workers of a loader.
        self._earlier = psutil.Process().children()

    def alive(self, *, direct: bool = False) -> list[psutil.Process]:
        """Return those that still run; with `direct` those alone that this process started itself."""
        below = psutil.Process().children(recursive=not direct)
        others = set(self._earlier)
        for process in self._earlier:
            with contextlib.suppress(psutil.NoSuchProcess):
                others.update(process.children(recursive=True))
        alive = []
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process not in others and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def end(self) -> None:
        """End all of them: ask, wait, then kill."""
        left = self.alive()
        if not left:
            return
        _send(left, signal.SIGTERM)
        _, left = psutil.wait_procs(left, timeout=_SECONDS_AFTER_TERMINATE)
        _send([*left, *self.alive()], signal.SIGKILL)
        psutil.wait_procs(left, timeout=_SECONDS_AFTER_TERMINATE)


class GracefulWorkers:
    """The workers that save and end by themselves on a signal, as they have noted it in a folder."""

    def __init__(self, folder: str) -> None:
        self._started = StartedProcesses()
        self._folder = Path(folder) / "stop"
        self._folder.mkdir(exist_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that tell workers of the folder."""
        return {STOP_FOLDER: str(self._folder)}

    def running(self) -> list[psutil.Process]:
        """Return those that still run."""
        noted = {entry.name for entry in self._folder.iterdir()}
        return [process for process in self._started.alive() if str(process.pid) in noted] if noted else []

    @property
    def have_stopped(self) -> bool:
        """Whether workers of the last attempt have ended in order to go on later."""
        return (self._folder / PREEMPTED_FILE).exists()

    def forget_stopped(self) -> None:
        """Begin another attempt."""
        (self._folder / PREEMPTED_FILE).unlink(missing_ok=True)


# --- signals ----------------------------------------------------------------------------------------------------------


class Shutdown:
    """What the launcher does with the signals it gets: the first one ends the run, a second one ends it at once.

    Graceful workers get SIGTERM handed on and the time to save; the run then ends by itself, and schedulers may repeat
    themselves meanwhile. Without such workers it is ended.

    Args:
        seconds_to_end: How long workers may take.
        workers: The graceful workers, None where the command below is not ours.
        requested: Is called when they are asked to save and end.
        ending: The names of the signals that end the run; None for all that end a program.
    """

    def __init__(
        self,
        seconds_to_end: float,
        workers: GracefulWorkers | None = None,
        requested: Callable[[], None] = lambda: None,
        *,
        ending: Iterable[str] | None = None,
    ) -> None:
        self.seconds_to_end = seconds_to_end
        self.signal: signal.Signals | None = None
        self.started = StartedProcesses()
        self._workers = workers
        self._requested = requested
        ends = _ENDING if ending is None else tuple(signal.Signals[name] for name in ending)
        self._handled = tuple(dict.fromkeys((*ends, *([_NOTICE] if _NOTICE is not None else []))))
        self._ended = threading.Event()
        self._asked_to_save = False
        self._arrived: list[signal.Signals] = []
        self._is_acting = False

    @property
    def exit_code(self) -> int | None:
        """The exit code a shell expects of a program that a signal ended."""
        return None if self.signal is None else 128 + self.signal

    @contextlib.contextmanager
    def handlers(self, raised: Callable[[signal.Signals], BaseException]) -> Iterator[None]:
        """Inside the block, turn the first signal into an exception of the main thread.

        Args:
            raised: Makes the exception from the signal.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, frame: FrameType | None) -> None:
            ending = self._act_on(signal.Signals(number))
            if ending is not None:
                raise raised(ending)

        # What is ignored stays so: `nohup` asks to live on, and a shell keeps Ctrl-C from what it runs in the background.
        heard = [number for number in self._handled if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heard}
        try:
            yield
        finally:
            self._ended.set()
            for number, old in before.items():
                # Who asked a run to save and end need not do so again while it does.
                is_done = self._asked_to_save and number in _REQUESTS
                signal.signal(number, signal.SIG_IGN if is_done else signal.SIG_DFL if old is None else old)

    def _act_on(self, number: signal.Signals) -> signal.Signals | None:
        """Act on a signal, and on those that come meanwhile; return the one that ends the run here and now."""
        self._arrived.append(number)
        ending: signal.Signals | None = None
        # One that comes while another is acted on waits here: a hundred of them would be a hundred handlers deep.
        while self._arrived and not self._is_acting:
            self._is_acting = True
            try:
                arrived, self._arrived = self._arrived, []
                for each in dict.fromkeys(arrived):
                    ending = each if self._receive(each) else ending
            finally:
                self._is_acting = False
        return ending

    def _receive(self, number: signal.Signals) -> bool:
        """Act on a signal and return whether it ends the run here and now."""
        graceful = self._workers.running() if self._workers is not None and number in _REQUESTS else []
        saves = bool(graceful) or (self._asked_to_save and number in _REQUESTS)
        if saves and not self._asked_to_save:
            self._asked_to_save = True
            self._requested()
        if number == _NOTICE:
            _send(graceful if saves else self.started.alive(direct=True), number)
            return False
        if self.signal is not None:
            if not saves:
                _send(self.started.alive(), signal.SIGKILL)
            return False
        self.signal = number
        if saves:
            action = f"the workers have {self.seconds_to_end:g} s to save and end; Ctrl-C ends them at once"
        else:
            action = "ending the workers; again ends them at once"
        sys.stderr.write(f"accelerate launch: {number.name}, {action}\n")
        _send(graceful, number)
        threading.Thread(target=self._escalate, daemon=True).start()
        return not saves

    def _escalate(self) -> None:
        """Go from a request to a kill for workers that do not end."""
        seconds = self.seconds_to_end
        if self.signal == signal.SIGINT:
            seconds = _SECONDS_AFTER_INTERRUPT
            if self._ended.wait(seconds):
                return
            _send(self.started.alive(), signal.SIGTERM)
        if not self._ended.wait(seconds):
            _send(self.started.alive(), signal.SIGKILL)


class _ShutdownRequested(BaseException):
    """The launcher got a signal; not an Exception, so that nothing on the way takes it for a failure."""


# --- one command ------------------------------------------------------------------------------------------------------


def run_command(plan: LaunchPlan, argv: tuple[str, ...], environment: Mapping[str, str], folder: str) -> int:
    """Start the command of a plan, wait for it, and return the exit code of the run.

    Raises:
        ConfigurationError: The program cannot be started.
    """
    shutdown = Shutdown(plan.seconds_to_end)
    memory = OutOfMemoryKills.now()
    with shutdown.handlers(lambda number: _ShutdownRequested()):
        code = _wait(argv, {**env.items(), **environment}, shutdown)
    if code == PREEMPTED_EXIT_CODE:
        return code  # the script was stopped for now, and has said so
    if shutdown.exit_code is not None:
        return shutdown.exit_code
    if code:
        _report_command(plan, code, Path(folder) / "failures", memory)
    return code if code >= 0 else 128 - code


def _wait(argv: tuple[str, ...], environment: dict[str, str], shutdown: Shutdown) -> int:
    process: subprocess.Popen[bytes] | None = None
    try:
        # A session of its own: Ctrl-C reaches it once, from here, and not a second time from the terminal.
        process = subprocess.Popen(argv, env=environment, start_new_session=True)
        return process.wait()
    except OSError as error:
        raise conflicts.cannot_start(argv[0], error) from error
    except _ShutdownRequested:
        if process is None:
            return 0
        process.send_signal(shutdown.signal or signal.SIGTERM)
        return process.wait()


def _report_command(plan: LaunchPlan, code: int, records: Path, memory: OutOfMemoryKills) -> None:
    """Report the first worker that left a record, else the command that failed."""
    failures, world_size = read_failures(records)
    if failures:
        sys.stderr.write(report(failures, world_size, memory, quiet=plan.quiet))
    elif plan.mode == "spawn_command":
        sys.stderr.write(f"\n{plan.launcher}: `{plan.argv[0]}` {_ended_with(code)}; its own lines above say why.\n")


def _ended_with(code: int) -> str:
    return f"ended with {f'exit code {code}' if code > 0 else signal.Signals(-code).name}"


# --- commands of several machines -------------------------------------------------------------------------------------


def run_machines(plan: LaunchPlan) -> int:
    """Start the commands of a plan's machines at the same time, wait for them, and return the exit code of the run.

    The first one that fails ends the others. Every line says which machine it is from.

    Raises:
        ConfigurationError: A program cannot be started.
    """
    shutdown = Shutdown(plan.seconds_to_end)
    with shutdown.handlers(lambda number: _ShutdownRequested()):
        failed = _wait_for_machines(plan, shutdown)
    if shutdown.exit_code is not None:
        return shutdown.exit_code
    if failed is None:
        return 0
    name, code = failed
    others = "; the others were ended" if len(plan.machines) > 1 else ""
    sys.stderr.write(f"\n{plan.launcher}: {name!r} {_ended_with(code)}{others}. The lines of [{name}] say why.\n")
    return code if code > 0 else 128 - code


def _wait_for_machines(plan: LaunchPlan, shutdown: Shutdown) -> tuple[str, int] | None:
    """Return the machine that failed first, with its code."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    copies: list[threading.Thread] = []
    environment = {**env.items(), **plan.environment}
    try:
        for name, argv in plan.machines.items():
            running[name] = _start_labelled(name, argv, environment, copies)
        while True:
            codes = {name: process.poll() for name, process in running.items()}
            failed = next(((name, code) for name, code in codes.items() if code), None)
            if failed is not None or None not in codes.values():
                return failed
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except _ShutdownRequested:
        for process in running.values():
            process.send_signal(shutdown.signal or signal.SIGTERM)
        for process in running.values():
            process.wait()
        return None
    finally:
        shutdown.started.end()
        for copy in copies:
            copy.join(timeout=_SECONDS_AFTER_TERMINATE)


def _start_labelled(
    name: str, argv: tuple[str, ...], environment: dict[str, str], copies: list[threading.Thread]
) -> subprocess.Popen[bytes]:
    """Start a command, and threads that pass its lines on with a name before them."""
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise conflicts.cannot_start(argv[0], error) from error
    for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        assert source is not None
        copy = threading.Thread(target=_copy_lines, args=(name, source, target), daemon=True)
        copy.start()
        copies.append(copy)
    return process


def _copy_lines(name: str, source: IO[bytes], target: IO[str]) -> None:
    for line in source:
        target.write(f"[{name}] {line.decode(errors='replace').rstrip()}\n")
        target.flush()
