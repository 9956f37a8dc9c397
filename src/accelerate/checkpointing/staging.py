"""Folders in the making: their names, who owns them, and how they go away."""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from accelerate.checkpointing.names import HIDDEN

_MARK = ".partial-"
_OWNED = re.compile(rf".*{re.escape(_MARK)}.+-\d+-[0-9a-f]+")
_SECONDS_WITHOUT_CHANGE = 3600.0
"""After this time without a change, a folder of another machine counts as left behind."""


def stage_name(target: str) -> str:
    """Return a new name for a folder that belongs to this process and is no checkpoint."""
    return f"{HIDDEN}{target}{_MARK}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def remove(folder: Path) -> None:
    """Remove a checkpoint; it stops being one at once, however long the removal of its files takes."""
    doomed = folder.with_name(stage_name(folder.name))
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_left_behind(parent: Path) -> None:
    """Remove what saves that were killed have left in a folder."""
    with suppress(OSError):
        for stage in parent.glob(f"{HIDDEN}*{_MARK}*"):
            if _OWNED.fullmatch(stage.name) and _owner_is_gone(stage):
                shutil.rmtree(stage, ignore_errors=True)


def _owner_is_gone(stage: Path) -> bool:
    host, process, _ = stage.name.rpartition(_MARK)[2].rsplit("-", 2)
    try:
        changed = max(entry.stat().st_mtime for entry in (stage, *stage.iterdir()))
    except OSError:
        return False
    if host != socket.gethostname():
        return time.time() - changed > _SECONDS_WITHOUT_CHANGE
    try:
        # A process that is younger than the folder has only inherited the number of its owner.
        return int(process) == os.getpid() or psutil.Process(int(process)).create_time() > changed
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
