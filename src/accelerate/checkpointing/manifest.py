"""The manifest of a checkpoint: what is in it, and whether that is still so."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.checksum import checksum
from accelerate.checkpointing.names import MANIFEST

VERSION = 1


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: its path in the folder, its size in bytes and the checksum of its bytes."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file of a checkpoint."""

    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


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
        return {"version": self.version, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the manifest of a checkpoint, None if it has none.

        Raises:
            CheckpointError: If there is one that cannot be read.
        """
        path = folder / MANIFEST
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["version"] > VERSION:
                raise ValueError(f"it has version {found['version']}, and this release reads up to {VERSION}")
            return cls(
                files=tuple(FileRecord(**record) for record in found["files"]),
                world_size=found["world_size"],
                facts=Facts(**found["facts"]),
                created=found["created"],
                versions=found["versions"],
                version=found["version"],
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{str(path)!r} cannot be read ({type(error).__name__}: {error}), so nobody knows whether the checkpoint "
                "is whole. Use another checkpoint, or remove this file to load the others unverified."
            ) from error

    def problems(self, folder: Path, *, checksums: bool, records: Iterable[FileRecord] | None = None) -> list[Problem]:
        """Return what is wrong with the files of a checkpoint.

        Args:
            checksums: Read the files as a whole, and do not trust their sizes.
            records: The files to look at; all if None.
        """
        found = (_problem(folder, record, checksums) for record in (self.files if records is None else records))
        return [problem for problem in found if problem is not None]


def verify(folder: Path, *, checksums: bool = True) -> list[Problem]:
    """Return what is wrong with a checkpoint; one without a manifest is not verified.

    Raises:
        CheckpointError: If its manifest cannot be read.
    """
    manifest = Manifest.read(folder)
    return [] if manifest is None else manifest.problems(folder, checksums=checksums)


def _problem(folder: Path, record: FileRecord, checksums: bool) -> Problem | None:
    path = folder / record.name
    try:
        size = path.stat().st_size
        if size != record.size:
            return Problem(record.name, f"it has {size} bytes instead of {record.size}")
        if checksums and checksum(path) != record.checksum:
            return Problem(record.name, "its bytes have changed since it was written (checksum)")
    except FileNotFoundError:
        return Problem(record.name, "it is missing")
    except OSError as error:
        return Problem(record.name, f"it cannot be read ({error.strerror})")
    return None
