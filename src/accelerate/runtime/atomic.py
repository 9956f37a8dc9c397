"""Make, sync and swap files and folders, so that a reader finds the old ones or the new ones and never half of either.

Whatever is being written has a hidden name that tells its owner, so that the next writer can remove what a killed one left.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

HIDDEN = "."
"""How the names of files and folders begin that are being written or removed."""
PARTIAL = ".partial-"
"""What comes between the name of a target and that of its owner."""
_SECONDS_WITHOUT_CHANGE = 3600.0
"""After this time without a change, what another machine was writing counts as abandoned."""


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
    return f"{HIDDEN}{target}{mark}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def make_stage(target: Path) -> Path:
    """Make a folder for what will be the target, on its disk: inside it if something in it has to stay, else beside it.

    Raises:
        NotADirectoryError: If the target is a file.
    """
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{str(target)!r} is a file, and a checkpoint is a folder. Give another path.")
    parent = target if target.is_dir() and any(target.iterdir()) else target.parent
    parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(parent, own_folders=True)
    stage = parent / partial_name(target.name)
    stage.mkdir()
    return stage


def swap_folder(stage: Path, target: Path) -> None:
    """Give a synced folder the name of the target, which is not there or empty."""
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


def remove_abandoned(parent: Path, mark: str = PARTIAL, *, own_folders: bool = False) -> None:
    """Remove what killed processes were writing in a folder.

    Args:
        mark: The kind of name to look for.
        own_folders: Remove folders of this process too: it writes none of them any more.
    """
    owned = re.compile(rf"\..*{re.escape(mark)}.+-\d+-[0-9a-f]+")
    with suppress(OSError):
        for path in parent.glob(f"{HIDDEN}*{mark}*"):
            if owned.fullmatch(path.name) and _is_abandoned(path, mark, own_folders):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _is_abandoned(path: Path, mark: str, own_folders: bool) -> bool:
    host, process, _ = path.name.rpartition(mark)[2].rsplit("-", 2)
    try:
        entries = [path, *path.iterdir()] if path.is_dir() else [path]
        changed = max(entry.stat().st_mtime for entry in entries)
    except OSError:
        return False
    if host != socket.gethostname():
        return time.time() - changed > _SECONDS_WITHOUT_CHANGE
    if int(process) == os.getpid():
        return own_folders and path.is_dir()
    try:
        # A process that is younger than the folder has only inherited the number of its owner.
        return psutil.Process(int(process)).create_time() > changed
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
