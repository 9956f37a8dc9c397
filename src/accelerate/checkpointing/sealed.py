"""Replace the checkpoint in a folder that stays, so that a kill at any moment leaves the old one or the new one.

The new files wait, complete, in a hidden folder inside the old checkpoint. Giving that folder its sealed name is the one
step that decides; moving its files into place can be done again from any point by whoever comes next. Files that are no
part of a checkpoint are never touched.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import names
from accelerate.checkpointing.manifest import Manifest
from accelerate.runtime import atomic

_SEALED = f"{atomic.HIDDEN}sealed"


def is_pending(folder: Path) -> bool:
    """Return whether a new checkpoint is decided in this folder and not yet in place."""
    return (folder / _SEALED).is_dir()


def seal(stage: Path, folder: Path) -> None:
    """Make the files of a stage, its manifest among them, the checkpoint of the folder."""
    finish(folder)
    stage.rename(folder / _SEALED)
    atomic.sync(folder)
    finish(folder)


def finish(folder: Path) -> None:
    """Move the files of a decided checkpoint into place."""
    source = folder / _SEALED
    if not source.is_dir():
        return
    new = Manifest.read(source)
    if new is not None:
        files = {record.name for record in new.files}
        # The manifest last: until then the old one says which old files are still to go.
        atomic.move_files(source, folder, files, stale=_own_files(folder) - files, last=names.MANIFEST)
    shutil.rmtree(source, ignore_errors=True)


def _own_files(folder: Path) -> set[str]:
    """Return the files of the checkpoint in a folder."""
    with suppress(CheckpointError):
        old = Manifest.read(folder)
        if old is not None:
            return {record.name for record in old.files}
    return {file.name for file in folder.iterdir() if file.is_file() and names.is_own_file(file.name)}
