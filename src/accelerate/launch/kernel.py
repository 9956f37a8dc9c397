"""Evidence in the kernel's counters and log that a process was killed for lack of memory."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_LOG_BYTES = 1 << 20


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
    for _, controllers, place in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        inside = place.lstrip("/")
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
