"""The report of a failed run: the worker that failed first, and how the kernel or the worker itself ended it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ways to die that a worker does not choose. SIGABRT is not among them: communication libraries abort when a peer is gone.
_KILLING_SIGNALS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
# What the others say when the one that failed is gone.
_LOST_A_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "remote process exited",
    "ncclremoteerror",
    "recvvalue failed",
    "socket timeout",
)
# A death without a record is dated when the agent sees it, which may be after the others have felt it.
_SECONDS_TO_NOTICE = 2.0
_CGROUPS = Path("/sys/fs/cgroup")
_LOG_BYTES = 1 << 20
# Beside the record of a failure: who the process is, and how whoever started it saw it end.
PROCESS_FILE = "process.json"
EXIT_CODE_FILE = "exit_code"


@dataclass(frozen=True)
class Failure:
    """How one worker ended.

    Args:
        exit_code: Negative for a signal.
        time: When it failed, in seconds; for a death without a record, when that was noticed.
        text: Its traceback or message, empty if it left none.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    time: float
    text: str = ""

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended it, if one did."""
        if self.exit_code >= 0:
            return None
        try:
            return signal.Signals(-self.exit_code)
        except ValueError:
            return None

    @property
    def is_echo(self) -> bool:
        """Whether it ended because another one was gone: by the agent's signal, or by losing its peer."""
        return self.signal is signal.SIGTERM or any(phrase in self.text.lower() for phrase in _LOST_A_PEER)


def read_record(path: Path) -> tuple[float | None, str]:
    """Return when a worker failed and what it said, from the files it left."""
    moment, text = None, ""
    try:
        message: Any = json.loads(path.read_text())["message"]
        if isinstance(message, dict):
            extra = message.get("extraInfo", {})
            moment = float(extra.get("precise_timestamp", extra.get("timestamp", 0))) or None
            text = str(extra.get("py_callstack") or message.get("message", ""))
        else:
            text = str(message)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    fault = path.with_name("fault.txt")
    if not text and fault.is_file():
        own = str(Path(__file__).with_name("worker.py"))
        text = "\n".join(line for line in fault.read_text(errors="replace").splitlines() if own not in line)
    return moment, text


def read_process(path: Path) -> dict[str, int]:
    """Return who a process is: pid, local_rank and world_size; nothing where it was ended before it could say so."""
    try:
        facts: dict[str, int] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts


def read_failures(folder: Path) -> tuple[list[Failure], int]:
    """Return the failures that processes left in their folders, named by rank, and the number of processes of the run.

    The list includes how processes without a failure ended.
    """
    places = [entry for entry in folder.iterdir() if entry.name.isdecimal()] if folder.is_dir() else []
    failures, world_size = [], len(places)
    for place in places:
        file, ended, record = (place / name for name in (PROCESS_FILE, EXIT_CODE_FILE, "error.json"))
        facts = read_process(file)
        world_size = max(world_size, facts.get("world_size", 0))
        rank = int(place.name)
        local_rank, pid = facts.get("local_rank", rank), facts.get("pid", 0)
        if not ended.exists() and not record.exists():
            end = read_end(place, rank, local_rank)
            failures += [end] if end is not None else []
            continue
        moment, text = read_record(record)
        code = int(ended.read_text()) if ended.exists() else 1
        failures.append(Failure(rank, local_rank, pid, code, moment or time.time(), text))
    return (failures if any(failure.exit_code for failure in failures) else []), world_size


def read_end(folder: Path, rank: int, local_rank: int) -> Failure | None:
    """Return how a worker ended that did not fail, from the file it left; None where there is none."""
    try:
        end = json.loads((folder / "end.json").read_text())
        return Failure(rank, local_rank, int(end["pid"]), 0, float(end["time"]), str(end["text"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure that the others follow from: where all have only lost a peer, the end of that peer."""
    failed = [failure for failure in failures if failure.exit_code != 0]
    latest = max(failure.time for failure in failed)
    ended = [failure for failure in failures if failure.exit_code == 0 and failure.time < latest]
    causes = [failure for failure in failed if not failure.is_echo] or ended or failed
    earliest = min(failure.time for failure in causes)
    killed = [
        failure
        for failure in causes
        if failure.signal in _KILLING_SIGNALS and failure.time <= earliest + _SECONDS_TO_NOTICE
    ]
    return min(killed or causes, key=lambda failure: (failure.time, failure.rank))


def report(
    failures: Sequence[Failure],
    world_size: int,
    memory: OutOfMemoryKills,
    *,
    quiet: bool = False,
    one_machine: bool = False,
) -> str:
    """Write the last lines of a run that failed: who, where, how, and the traceback.

    Args:
        one_machine: All workers of the run were on this machine.
    """
    root = first_failure(failures)
    how = "failed" if root.exit_code else "ended before the others"
    who = f"rank {root.rank} of {world_size} {how} on {socket.gethostname()}"
    lines = ["", "-" * 100, f"{who} (local rank {root.local_rank}, process {root.pid}): {_how(root, memory)}"]
    others = sorted(failure.rank for failure in failures if failure is not root and failure.exit_code)
    if others:
        lines.append(f"ended after it: rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}")
    if root.is_echo and one_machine:
        lines.append("It lost its peers: another process ended without a record, as os._exit() does.")
    elif root.is_echo:
        lines.append("It lost its peers: the cause is probably on another machine; read the end of that one's output.")
    if not quiet:
        lines.append(root.text.rstrip() or _no_text(root))
    return "\n".join(lines) + "\n"


def exit_code_of(failures: Sequence[Failure]) -> int:
    """Return the exit code of the launcher for the failures of its workers."""
    failure = first_failure([failure for failure in failures if failure.exit_code])
    return failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code


def _how(failure: Failure, memory: OutOfMemoryKills) -> str:
    if failure.exit_code >= 0:
        return f"exit code {failure.exit_code}"
    name = failure.signal.name if failure.signal is not None else f"signal {-failure.exit_code}"
    if failure.signal is not signal.SIGKILL:
        return name
    evidence = memory.evidence_since(failure.pid)
    if evidence is None:
        return f"{name}, sent from outside (the kernel's counters show no kill for lack of memory)"
    return f"{name}: killed, probably by the kernel for lack of memory ({evidence})"


def _no_text(failure: Failure) -> str:
    if failure.signal is not None:
        return "It was ended by that signal and could not leave a traceback."
    return "It left no traceback: what it printed above is all there is."


# --- kills for lack of memory ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutOfMemoryKills:
    """How many kills the kernel had counted at one moment; None where a counter cannot be read."""

    control_group: int | None
    machine: int | None

    @classmethod
    def now(cls) -> OutOfMemoryKills:
        """Read the counters of this process's control group and of the machine."""
        return cls(_control_group_kills(), _counter(Path("/proc/vmstat"), "oom_kill"))

    def evidence_since(self, pid: int) -> str | None:
        """Return what shows that the kernel killed for lack of memory since this moment, None if nothing does."""
        now = OutOfMemoryKills.now()
        if _grew(self.control_group, now.control_group):
            return (
                f"the memory limit of its control group was hit: oom_kill {self.control_group} -> {now.control_group}"
            )
        if _grew(self.machine, now.machine):
            return f"the kernel counted a kill for lack of memory: oom_kill {self.machine} -> {now.machine}"
        line = _log_line(pid)
        return f"the kernel's log says: {line}" if line else None


def _grew(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _counter(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return None


def _control_group_kills() -> int | None:
    """Look where version 2 keeps the counter, then where version 1 does."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for _, controllers, group in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        inside = group.lstrip("/")
        if not controllers:
            # In a container the path is that of the host and the files are at the root.
            candidates = (_CGROUPS / inside / "memory.events", _CGROUPS / "memory.events")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            candidates = (root / inside / "memory.oom_control", root / "memory.oom_control")
        else:
            continue
        for candidate in candidates:
            count = _counter(candidate, "oom_kill")
            if count is not None:
                return count
    return None


def _log_line(pid: int) -> str | None:
    """Return the line of the kernel's log about the killed process, where this user may read the log."""
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    text = b""
    try:
        # One record a read, until there are no more, which is a BlockingIOError.
        with contextlib.suppress(OSError):
            while len(text) < _LOG_BYTES:
                text += os.read(log, 8192)
    finally:
        os.close(log)
    found = re.search(rf"Killed process {pid} .*", text.decode(errors="replace"))
    return found.group().strip() if found else None
