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
from accelerate.checkpointing import names, staging
from accelerate.checkpointing.manifest import Manifest

_SEALED = f"{names.HIDDEN}sealed"


def is_pending(folder: Path) -> bool:
    """Return whether a new checkpoint is decided in this folder and not yet in place."""
    return (folder / _SEALED).is_dir()


def seal(stage: Path, folder: Path) -> None:
    """Make the files of a stage, its manifest among them, the checkpoint of the folder."""
    finish(folder)
    stage.rename(folder / _SEALED)
    staging.sync(folder)
    finish(folder)


def finish(folder: Path) -> None:
    """Move the files of a decided checkpoint into place."""
    source = folder / _SEALED
    if not source.is_dir():
        return
    new = Manifest.read(source)
    if new is not None:
        _drop_old(folder, {record.name for record in new.files})
        for record in new.files:
            _move(source / record.name, folder / record.name)
        staging.sync(folder)
        # The manifest last: until then the old one says which old files are still to go.
        _move(source / names.MANIFEST, folder / names.MANIFEST)
    staging.sync(folder)
    shutil.rmtree(source, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    with suppress(FileNotFoundError):  # moved before a kill
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def _drop_old(folder: Path, kept: set[str]) -> None:
    """Remove the files of the checkpoint that is replaced."""
    try:
        old = Manifest.read(folder)
    except CheckpointError:
        old = None
    if old is not None:
        files = {record.name for record in old.files}
    else:
        files = {file.name for file in folder.iterdir() if file.is_file() and names.is_own_file(file.name)}
    for name in files - kept:
        with suppress(OSError):
            (folder / name).unlink()
