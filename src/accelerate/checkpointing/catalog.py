"""Which checkpoints there are, and which of them can be used."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from accelerate._base.constants import RNG_STATE_NAME
from accelerate._base.errors import CheckpointError, ConfigurationError, printable
from accelerate._base.helpers import Choice
from accelerate._base.untrusted import parse_json, read_limited
from accelerate.checkpointing.manifest import MANIFEST, Manifest, finish_publish, is_own_file, is_pending
from accelerate.offload.safetensors_format import read_header
from accelerate.runtime import atomic

CHECKPOINTS = "checkpoints"
"""The folder of a project that holds its numbered checkpoints."""
_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint on the disk.

    Args:
        created: Seconds since 1970.
        size: Bytes of its files.
        world_size: Processes that wrote it; 0 if that is not known.
        is_valid: Whether its files are all there, with their sizes; with checksums where that was asked for.
        problem: What is wrong, or what is not known.
    """

    path: Path
    name: str
    step: int
    epoch: int
    samples: int
    created: float
    size: int
    world_size: int
    is_valid: bool
    problem: str | None = None


def catalog(folder: Path | str) -> list[CheckpointInfo]:
    """Return the checkpoints in a folder, the newest last.

    Args:
        folder: A folder of checkpoints, or the folder of a project.
    """
    inside = Path(folder) / CHECKPOINTS
    parent = inside if inside.is_dir() else Path(folder)
    found = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        if entry.is_dir() and not entry.name.startswith(atomic.HIDDEN) and is_checkpoint(entry):
            with suppress(FileNotFoundError):  # another process is removing it
                found.append(inspect(entry))
    by_number = all(number_of(info.path) is not None for info in found)
    return sorted(found, key=lambda info: (number_of(info.path) or 0) if by_number else info.created)


@dataclass(frozen=True)
class Newest(Choice[CheckpointInfo | None]):
    """Hold the newest valid checkpoint, None if there is none, and a reason that names what was passed over.

    Args:
        passed_over: How many newer ones are there that cannot be used.
    """

    passed_over: int


def newest_valid(folder: Path | str, *, without: Mapping[Path, str] = MappingProxyType({})) -> Newest:
    """Return the newest checkpoint whose files are all there.

    Args:
        without: Checkpoints that are known to be broken, and what is wrong with each.
    """
    passed_over: list[str] = []
    for info in reversed(catalog(folder)):
        if info.is_valid and info.path not in without:
            reason = f"{printable(info.name)} is the newest valid checkpoint in {str(folder)!r}"
            return Newest(info, "; ".join([reason, *passed_over]), len(passed_over))
        passed_over.append(f"{printable(info.name)} was passed over ({without.get(info.path, info.problem)})")
    reason = f"there is no valid checkpoint in {str(folder)!r}"
    return Newest(None, "; ".join([reason, *passed_over]), len(passed_over))


def surplus(checkpoints: Sequence[CheckpointInfo], keep: int, *, spare: Path | None = None) -> list[CheckpointInfo]:
    """Return the checkpoints that are not among the newest valid ones; none of them if none is valid.

    Args:
        checkpoints: What `catalog` returned.
        keep: How many valid ones stay.
        spare: A checkpoint that stays and counts as the newest; only numbered ones are named then.

    Raises:
        ConfigurationError: (a ValueError) if nothing would be kept.
    """
    if keep < 1:
        raise ConfigurationError(
            f"keep={keep!r} was given, which would remove every checkpoint. Write 1 or more, or delete the folder."
        )
    if spare is not None:
        checkpoints = [info for info in checkpoints if info.path != spare and number_of(info.path) is not None]
        keep -= 1
    elif not any(info.is_valid for info in checkpoints):
        return []  # what is broken may be all that is left of a run
    valid = [info.path for info in checkpoints if info.is_valid]
    kept = set(valid[len(valid) - keep :] if keep < len(valid) else valid)
    return [info for info in checkpoints if info.path not in kept]


def prune(folder: Path | str, keep: int, *, spare: Path | None = None) -> list[Path]:
    """Remove what `surplus` names in a folder, the newest first, and return it."""
    removed = [info.path for info in reversed(surplus(catalog(folder), keep, spare=spare))]
    for path in removed:
        atomic.remove_folder(path)
    return removed


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder was written by `save_state`, here or by the library that this one follows."""
    if is_pending(folder) or (folder / MANIFEST).is_file():
        return True
    return number_of(folder) is not None or (folder / f"{RNG_STATE_NAME}_0.pkl").is_file()


def inspect(folder: Path, checksums: bool = False) -> CheckpointInfo:
    """Return what is known of a checkpoint; one that a killed save left half in place is put in place first."""
    manifest: Manifest | None = None
    try:
        finish_publish(folder)
        manifest = Manifest.read(folder)
        if manifest is not None:
            problem = "; ".join(map(str, manifest.problems(folder, checksums=checksums))) or None
        else:
            problem = _problem_without_manifest(folder)
    except FileNotFoundError:
        raise
    except (OSError, CheckpointError) as error:
        problem = str(error)
    is_valid = problem is None
    size = 0
    if manifest is None:
        problem = problem or "no manifest"
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    known = manifest or Manifest((), world_size=0, created=folder.stat().st_mtime, versions={})
    return CheckpointInfo(
        path=folder,
        name=folder.name,
        step=known.facts.step,
        epoch=known.facts.epoch,
        samples=known.facts.samples,
        created=known.created,
        size=size or known.size,
        world_size=known.world_size,
        is_valid=is_valid,
        problem=problem,
    )


def verify(checkpoint: CheckpointInfo, advance: Callable[[int], object] = lambda size: None) -> CheckpointInfo:
    """Return what is known of a checkpoint once all its bytes are read; without a manifest that is what it was.

    Args:
        advance: Called with the size of each file that was read.
    """
    try:
        manifest = Manifest.read(checkpoint.path)
    except CheckpointError as error:
        return replace(checkpoint, is_valid=False, problem=str(error))
    if manifest is None:
        return checkpoint
    problems = []
    for record in manifest.files:
        problems += manifest.problems(checkpoint.path, checksums=True, records=[record])
        advance(record.size)
    return replace(checkpoint, is_valid=not problems, problem="; ".join(map(str, problems)) or None)


def numbered(folder: Path, number: int) -> Path:
    """Return the folder of a checkpoint that is named automatically."""
    return folder / f"checkpoint_{number}"


def number_of(folder: Path) -> int | None:
    """Return the number in the name of a checkpoint's folder, None if it has another name."""
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None


def _problem_without_manifest(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint that another library wrote: each file must open."""
    files = [file for file in folder.iterdir() if file.is_file() and is_own_file(file.name)]
    for file in files:
        try:
            if file.suffix == ".safetensors":
                if read_header(file).file_size != file.stat().st_size:
                    return f"{file.name}: it is cut off"
            elif file.suffix == ".json":
                parse_json(read_limited(file))
            elif not zipfile.is_zipfile(file):
                return f"{file.name}: it is not a whole torch file"
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            return f"{file.name}: it cannot be opened ({error})"
    return None if files else "it holds no file of a checkpoint"
