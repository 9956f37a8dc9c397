"""The manifest of a checkpoint: what is in its folder, and how a new one takes the place of an old one."""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import stat
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelerate._base import constants
from accelerate._base.errors import CheckpointError
from accelerate._base.untrusted import is_whole, parse_json, read_limited, shown
from accelerate.checkpointing.files import FileProblem, FileRecord
from accelerate.runtime import atomic

VERSION = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
LOADER, STATEFUL_LOADER, CUSTOM, WINDOW = "loader", "dl_state_dict", "custom_checkpoint", "window"
"""How the names of files begin that constants do not name."""
_STEMS = [
    constants.MODEL_NAME,
    constants.SAFE_MODEL_NAME,
    constants.OPTIMIZER_NAME,
    constants.SCHEDULER_NAME,
    constants.SAMPLER_NAME,
    constants.RNG_STATE_NAME,
    LOADER,
    STATEFUL_LOADER,
    CUSTOM,
    WINDOW,
]
_OWN_FILE = re.compile(
    rf"(?:{'|'.join(_STEMS)})(?:_\d+)?(?:_rank\d+)?\.(?:bin|pkl|pt|safetensors)"
    rf"|{constants.SCALER_NAME}|{PROGRESS}|{re.escape(MANIFEST)}"
)
# The year 9999, after which the calendar of Python has no dates.
_END_OF_TIME = 253402300800
_MOST_PROCESSES = 10**6
_PENDING = f"{atomic.HIDDEN}sealed"
"""The folder of new files that are decided to be the checkpoint, inside the folder of the old one."""
UNTOUCHED = "Earlier checkpoints are untouched."


@dataclass(frozen=True)
class Facts:
    """Where the run stood when a checkpoint was taken.

    Args:
        step: Optimizer updates.
        samples: Samples that trained, over all ranks and epochs.
        epoch: The epoch in which training goes on.
        iteration: The number of the save.
    """

    step: int = 0
    samples: int = 0
    epoch: int = 0
    iteration: int = 0


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("accelerate", "torch", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def _checksum(found: Mapping[str, Any]) -> str:
    """Return the checksum of what a manifest says."""
    content = {name: value for name, value in found.items() if name != "checksum"}
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint, written last: a folder that has one was complete."""

    files: tuple[FileRecord, ...]
    world_size: int = 1
    facts: Facts = field(default_factory=Facts)
    created: float = field(default_factory=time.time)
    versions: dict[str, str] = field(default_factory=_versions)
    version: int = VERSION

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(record.size for record in self.files)

    def to_json(self) -> dict[str, Any]:
        """Return what is written to the file."""
        found = {"version": self.version, **asdict(self)}
        return {**found, "checksum": _checksum(found)}

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a checkpoint, None if it has none.

        Raises:
            CheckpointError: If there is one that cannot be read.
        """
        path = folder / MANIFEST
        try:
            return cls._from_json(parse_json(read_limited(path)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{str(path)!r} cannot be read ({type(error).__name__}: {error}), so nobody knows whether the checkpoint "
                "is whole. Use another checkpoint, or remove this file to load the others unverified."
            ) from error

    @classmethod
    def _from_json(cls, found: Any) -> Manifest:
        if found["version"] > VERSION:
            raise ValueError(f"it has version {found['version']}, and this release reads up to {VERSION}")
        if found.get("checksum", own := _checksum(found)) != own:
            raise ValueError("its bytes have changed since it was written")
        created, versions = found["created"], found["versions"]
        facts = {entry.name: found["facts"].get(entry.name, 0) for entry in fields(Facts)}
        numbers = {"version": found["version"], "world_size": found["world_size"], **facts}
        for name, number in numbers.items():
            if not is_whole(number):
                raise ValueError(f"{name}={shown(number)} is no whole number from 0 on")
        if numbers["world_size"] > _MOST_PROCESSES:
            raise ValueError(f"world_size={shown(numbers['world_size'])} is more processes than any run has")
        if type(created) not in (int, float) or not 0 <= created < _END_OF_TIME:
            raise ValueError(f"it was made at {shown(created)}, which is no time")
        if not isinstance(versions, dict) or not all(isinstance(text, str) for text in versions.values()):
            raise ValueError(f"it has the versions {shown(versions)}, which are not names with texts")
        return cls(
            files=tuple(FileRecord(record["name"], record["size"], record["checksum"]) for record in found["files"]),
            world_size=found["world_size"],
            facts=Facts(**facts),
            created=created,
            versions=versions,
            version=found["version"],
        )

    def problems(
        self, folder: Path, *, checksums: bool, records: Iterable[FileRecord] | None = None
    ) -> list[FileProblem]:
        """Return what is wrong with the files of a checkpoint.

        Args:
            checksums: Read the files as a whole, and do not trust their sizes.
            records: The files to look at; all if None.
        """
        found = (record.problem(folder, checksums=checksums) for record in (self.files if records is None else records))
        return [problem for problem in found if problem is not None]


def moment_in(folder: Path) -> float:
    """Return the time for a new checkpoint in a folder: now, or after those that are there if the clock went back."""
    found = [time.time()]
    for entry in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError, CheckpointError, TypeError, OverflowError):  # of another one, and broken
            manifest = Manifest.read(entry)
            if manifest is not None and math.isfinite(manifest.created):
                found.append(manifest.created + 0.001)
    return max(found)


def publish(stage: Path, target: Path, manifest: Manifest) -> None:
    """Make the files of a stage the checkpoint `target`, so that a kill at any moment leaves the old one or the new one.

    A stage inside the target replaces the checkpoint in it: giving it the name of what is decided is the one step that
    counts; moving its files into place can be done again from any point by whoever comes next. Files that are no part of
    a checkpoint are never touched. Files are not open to more users than the target is.
    """
    path = stage / MANIFEST
    path.write_text(json.dumps(manifest.to_json(), indent=2) + "\n", encoding="utf-8")
    if stage.parent == target:
        allowed = stat.S_IMODE(target.stat().st_mode) | stat.S_IRWXU
        for file in stage.rglob("*"):
            mode = stat.S_IMODE(file.lstat().st_mode)
            # A link, which a hook may have made, has no mode of its own. Some file systems refuse any chmod.
            if mode & ~allowed and not file.is_symlink():
                file.chmod(mode & allowed)
    atomic.sync(path)
    for folder in {stage, *((stage / record.name).parent for record in manifest.files)}:
        atomic.sync(folder)
    if stage.parent != target:
        atomic.swap_folder(stage, target)
        return
    finish_publish(target)
    atomic.swap_folder(stage, target / _PENDING)
    finish_publish(target)


def describe_failure(target: Path, manifest: Manifest) -> str:
    """Return what a `publish` that raised an error left in the target."""
    for folder, text in (
        (target, "The new checkpoint is in place, but may be lost if the machine crashes now."),
        (target / _PENDING, "Its files are complete: the next save or load moves them into place."),
    ):
        with suppress(CheckpointError):
            if Manifest.read(folder) == manifest:
                return text
    return UNTOUCHED


def is_pending(folder: Path) -> bool:
    """Return whether a new checkpoint is decided in this folder and not yet in place."""
    return (folder / _PENDING).is_dir()


def finish_publish(folder: Path) -> None:
    """Move the files of a decided checkpoint into place, if there is one.

    Raises:
        CheckpointError: If it cannot be read, or its files would be moved from or to places outside of the folder.
    """
    source = folder / _PENDING
    if not source.is_dir():
        return
    new = Manifest.read(source)
    if new is not None:
        files = {record.name for record in new.files}
        stale = _files_of(folder) - files
        moved = [source / name for name in (MANIFEST, *files)]
        _check_places(folder, [folder / name for name in files | stale] + moved)
        # The manifest last: until then the old one says which old files are still to go.
        atomic.move_files(source, folder, files, stale=stale, last=MANIFEST)
    shutil.rmtree(source, ignore_errors=True)


def _check_places(folder: Path, files: Iterable[Path]) -> None:
    """Refuse to move or to remove files through a link to another place: a checkpoint is saved without such links."""
    root = folder.resolve()
    for place in {file.parent for file in files}:
        if not place.resolve().is_relative_to(root):
            raise CheckpointError(
                f"{str(place)!r} is a link out of the checkpoint {str(folder)!r}, whose files are to be replaced: those of "
                "another place would be lost. Remove the link, or use another checkpoint."
            )


def _files_of(folder: Path) -> set[str]:
    """Return the files of the checkpoint in a folder."""
    with suppress(CheckpointError):
        manifest = Manifest.read(folder)
        if manifest is not None:
            return {record.name for record in manifest.files}
    return {file.name for file in folder.iterdir() if file.is_file() and is_own_file(file.name)}


def is_own_file(name: str) -> bool:
    """Return whether a file of this name, in a folder without a manifest, belongs to a checkpoint."""
    return _OWN_FILE.fullmatch(name) is not None
