"""Make, sync and swap files and folders, so that a reader finds the old ones or the new ones and never half of either.

Whatever is being written has a hidden name that tells its owner, so that the next writer can remove what a killed one left.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from accelerate._base.untrusted import can_be_path, number_in

HIDDEN = "."
"""How the names of files and folders begin that are being written or removed."""
PARTIAL = ".partial-"
"""What comes between the name of a target and that of its owner."""
_SECONDS_WITHOUT_CHANGE = 3600.0
"""What an owner that cannot be seen from here has not changed for so long counts as abandoned."""
_PROC = Path("/proc")
_LARGEST_PROCESS = 2**31 - 1
_LARGEST_TICK = 2**63 - 1
_MOST_OF_A_NAME = 255


# --- owners -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Owner:
    """A process that owns files on a disk, told from others without a clock: clocks jump, and differ between machines.

    Args:
        host: The name of its machine, for people.
        process: Its number.
        started: When it began, in ticks since the machine did; None if that is not known.
        place: Where numbers of processes mean the same: a machine since its last start, and a container on it.
    """

    host: str
    process: int
    started: int | None = None
    place: str | None = None

    @classmethod
    def this_process(cls) -> Owner:
        """Return the owner of what this process writes."""
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()), _place(socket.gethostname()))

    @classmethod
    def parse(cls, tag: str) -> Owner:
        """Return the owner that a tag names; those of earlier releases have a host and a number.

        Raises:
            ValueError: If it names no process that a system can have, or cannot stand in the name of a file.
        """
        host, _, rest = tag.rpartition("-")
        process, _, more = rest.partition(".")
        started, _, place = more.partition(".")
        number, tick = number_in(process, _LARGEST_PROCESS), number_in(started, _LARGEST_TICK)
        if number is None or (started and tick is None):
            raise ValueError("the tag names no process")
        if len(tag) > _MOST_OF_A_NAME or "/" in tag or "\\" in tag or not can_be_path(tag):
            raise ValueError("the tag is no name")
        return cls(host, number, tick, place or None)

    @property
    def tag(self) -> str:
        """Return what is written into names."""
        return f"{self.host}-{self.process}.{self.started or 0}.{self.place}"

    def __str__(self) -> str:
        return f"process {self.process} on {self.host!r}"

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if it cannot be seen from here."""
        here = socket.gethostname()
        if self.place not in (None, _place(here)) or (self.place is None and self.host != here):
            return None
        try:
            started = _start_of(self.process)
        except ProcessLookupError:
            return False
        except PermissionError:
            return None
        # Without the ticks nobody knows whether the process has only inherited the number of the owner.
        return None if self.started is None else started == self.started

    def is_above(self) -> bool:
        """Return whether this process was started by the owner, or by a process that it started."""
        try:
            numbers = [parent.pid for parent in psutil.Process().parents()]
        except psutil.Error:  # some of them cannot be looked at
            return False
        return self.process in numbers and self.is_alive() is True


@cache
def _place(host: str) -> str:
    """Return what is the same for all processes that this one can see, and for no others."""
    facts = [host]
    with suppress(OSError):
        facts.append((_PROC / "sys/kernel/random/boot_id").read_text().strip())
        facts.append(str((_PROC / "self/ns/pid").readlink()))
    return hashlib.sha256("/".join(facts).encode()).hexdigest()[:8]


def _start_of(process: int) -> int:
    """Return when a process began, in a number that stays the same whatever happens to the clock.

    Raises:
        ProcessLookupError: If there is no such process, or it has ended and nobody has asked how.
        PermissionError: If there is one, and this one may not look at it.
    """
    if not (_PROC / "self/stat").exists():
        return _create_time_of(process)
    try:
        stat = (_PROC / str(process) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        os.kill(process, 0)  # there may be one of another user that is not shown: a PermissionError
        raise ProcessLookupError(process) from None
    state, *fields = stat.rpartition(")")[2].split()  # a name may hold spaces and brackets
    if state in "ZXx":
        raise ProcessLookupError(process)
    return int(fields[18])


def _create_time_of(process: int) -> int:
    try:
        found = psutil.Process(process)
        if found.status() == psutil.STATUS_ZOMBIE:
            raise ProcessLookupError(process)
        return int(found.create_time() * 1000)
    except psutil.NoSuchProcess:
        raise ProcessLookupError(process) from None
    except psutil.AccessDenied:
        raise PermissionError(process) from None


# --- files and folders ------------------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_file(target: Path, *, synced: bool = True) -> Iterator[Path]:
    """Yield a path to write to, beside the target; the file takes the target's place when the block ends well.

    Args:
        synced: Wait until it is on the disk; not needed for what can be made again after a crash of the machine.
    """
    remove_abandoned(target.parent)
    partial = target.with_name(partial_name(target.name))
    try:
        yield partial
        if synced:
            sync(partial)
        partial.replace(target)
        if synced:
            sync(target.parent)
    finally:
        partial.unlink(missing_ok=True)


def partial_name(target: str = "", mark: str = PARTIAL) -> str:
    """Return a new hidden name that belongs to this process.

    Args:
        target: What it will be.
        mark: What tells this kind of name from others.
    """
    return f"{HIDDEN}{target}{mark}{Owner.this_process().tag}-{uuid.uuid4().hex[:8]}"


def make_stage(target: Path, claimed: Path | None = None) -> Path:
    """Make a folder for what will be the target, on its disk: inside the target if that exists, else next to it.

    A target that exists keeps its inode, owner and mode: it may be private, or the working directory of a process.

    Args:
        claimed: A folder in which nobody but this run writes: what others have left in it, or for it, is abandoned.

    Raises:
        NotADirectoryError: If the target is a file.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{str(target)!r} is a file, and a checkpoint is a folder. Give another path.")
    parent = target if target.is_dir() else target.parent
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent, own_folders=True, claimed=claimed)
    stage = parent / partial_name(target.name)
    stage.mkdir()
    _stages().add(stage)
    return stage


def discard_stage(stage: Path) -> None:
    """Remove a folder that will be nothing; what cannot be removed now is when the next one is made."""
    _stages().discard(stage)
    shutil.rmtree(stage, ignore_errors=True)


def _stages() -> set[Path]:
    from accelerate.runtime import current  # it loads torch, which `accelerate checkpoints` does without

    return current.STAGES


def swap_folder(stage: Path, target: Path) -> None:
    """Give a synced folder the name of the target, which does not exist."""
    stage.rename(target)
    sync(target.parent)


def move_files(source: Path, folder: Path, names: Iterable[str], *, stale: Iterable[str], last: str) -> None:
    """Replace files of a folder by those of another one; it can be done again from any point after a kill.

    Args:
        names: The files to move; those that are not in the source were moved before.
        stale: Files of the folder that go.
        last: The file that is moved when all others are in place, on the disk.
    """
    for name in stale:
        with suppress(OSError):
            (folder / name).unlink()
    for name in names:
        _move(source / name, folder / name)
    sync(folder)
    _move(source / last, folder / last)
    sync(folder)


def _move(source: Path, target: Path) -> None:
    with suppress(FileNotFoundError):
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def remove_folder(folder: Path) -> None:
    """Remove a folder; its name is gone at once, however long the removal of its files takes."""
    doomed = folder.with_name(partial_name(folder.name))
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_abandoned(
    parent: Path, mark: str = PARTIAL, *, own_folders: bool = False, claimed: Path | None = None
) -> None:
    """Remove what killed processes were writing in a folder.

    Args:
        mark: The kind of name to look for.
        own_folders: Remove folders of this process too, but for the stages that it is writing to.
        claimed: A folder in which nobody but this run writes.
    """
    owned = re.compile(rf"\..*{re.escape(mark)}(.+-\d+(?:\.\d+\.[0-9a-f]+)?)-[0-9a-f]+")
    with suppress(OSError):
        for path in parent.glob(f"{HIDDEN}*{mark}*"):
            match = owned.fullmatch(path.name)
            if match is None:
                continue
            is_ours = claimed is not None and (
                parent == claimed or path.name.startswith(f"{HIDDEN}{claimed.name}{mark}")
            )
            try:
                owner = Owner.parse(match[1])
            except ValueError:  # a number that no process has: the name is not of ours
                continue
            if owner.process == os.getpid() and owner.is_alive():
                is_abandoned = own_folders and path.is_dir() and path not in _stages()
            else:
                is_abandoned = _is_abandoned(path, owner, is_ours)
            if is_abandoned:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _is_abandoned(path: Path, owner: Owner, is_ours: bool) -> bool:
    """Return whether nobody writes a file or folder any more.

    Args:
        is_ours: Nobody but this run may write it.
    """
    is_alive = owner.is_alive()
    if is_alive is None:
        return is_ours or _is_unchanged(path)
    return not is_alive


def _is_unchanged(path: Path) -> bool:
    """Return whether this process has seen for long that something does not change, by a clock that does not jump."""
    from accelerate.runtime import current

    try:
        entries = [path, *path.rglob("*")] if path.is_dir() else [path]
        seen = [(entry.name, entry.stat().st_mtime_ns, entry.stat().st_size) for entry in entries]
    except OSError:
        return False
    before, since = current.WATCHED.get(path, (None, 0.0))
    if before == seen:
        return time.monotonic() - since >= _SECONDS_WITHOUT_CHANGE
    current.WATCHED[path] = (seen, time.monotonic())
    return False
