"""Put the weight files of a model into a folder so that a reader finds the old ones or the new ones, never some of both."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from accelerate._base import constants
from accelerate.runtime.atomic import partial_name, remove_abandoned, sync

STAGE_MARK = "accelerate-save-"
"""How stages are named. It is not how those of checkpoints are: an index may point into a stage for a while, so nothing but
the next save of weights may remove it."""


@dataclass(frozen=True)
class WeightFormat:
    """The names that weights have in a folder.

    Args:
        single: The file of a model that is in one piece.
        index: The file that says in which shard each weight is.
        pattern: The names of files, with `{suffix}` for the number of a shard.
    """

    single: str
    index: str
    pattern: str

    def owns(self, name: str) -> bool:
        """Return whether a file of this name is one that a save in this format writes."""
        stem, ending = self.pattern.split("{suffix}")
        shard = rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(ending)}"
        return name in (self.single, self.index) or re.fullmatch(shard, name) is not None


SAFETENSORS = WeightFormat(
    constants.SAFE_WEIGHTS_NAME, constants.SAFE_WEIGHTS_INDEX_NAME, constants.SAFE_WEIGHTS_PATTERN_NAME
)
TORCH = WeightFormat(constants.WEIGHTS_NAME, constants.WEIGHTS_INDEX_NAME, constants.WEIGHTS_PATTERN_NAME)
_FORMATS = (SAFETENSORS, TORCH)


class WeightFolder(Protocol):
    """Where weights are saved to."""

    def stage(self) -> contextlib.AbstractContextManager[Path]:
        """Return a folder to write new weights to; what is in it goes away if writing them fails."""

    def take(self, file: Path, settle: Callable[[], object]) -> None:
        """Take a staged file; it may be gone afterwards.

        Args:
            settle: Waits until what was staged is on the disk.
        """

    def publish(self, kind: WeightFormat, files: Sequence[str], index: Mapping[str, Any] | None) -> None:
        """Put staged weights in place, and take away what earlier saves left there.

        What a reader opens first, a file with all weights or an index, changes in one step once everything it names is
        in place. Weights that are in one file win over an index in all readers, so an old one of these goes last.

        Args:
            files: The names of the staged files.
            index: Where each weight is, if there are several files.
        """


class LocalFolder:
    """A folder on a disk of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stage = folder / partial_name(mark=STAGE_MARK)

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stage.mkdir()
        try:
            yield self._stage
        except BaseException:
            shutil.rmtree(self._stage, ignore_errors=True)
            raise

    def __str__(self) -> str:
        return str(self._folder)

    def take(self, file: Path, settle: Callable[[], object]) -> None:
        """Leave the file: the stage is on the disk that it is for."""

    def publish(self, kind: WeightFormat, files: Sequence[str], index: Mapping[str, Any] | None) -> None:
        stage, folder = self._stage, self._folder
        try:
            sync(stage)
            if index is None:
                (stage / kind.single).replace(folder / kind.single)
            else:
                _publish_shards(stage, folder / kind.index, files, index)
            sync(folder)
        except BaseException:
            if not _is_in_use(stage, folder / kind.index):
                shutil.rmtree(stage, ignore_errors=True)
            raise
        for name in stale_names((file.name for file in folder.iterdir()), kind, files, index):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(stage, ignore_errors=True)
        remove_abandoned(folder, STAGE_MARK)
        sync(folder)


def stale_names(
    present: Iterable[str], kind: WeightFormat, files: Sequence[str], index: Mapping[str, Any] | None
) -> list[str]:
    """Return which of the names in a folder are weights of earlier saves, in the order in which they go."""
    kept = {*files, *([kind.index] if index is not None else ())}
    stale = [name for name in present if name not in kept and any(known.owns(name) for known in _FORMATS)]
    # What is opened first goes first: an index whose shards are gone would be an error instead of nothing.
    entries = {name for known in _FORMATS for name in (known.single, known.index)}
    return sorted(stale, key=lambda name: name not in entries)


def index_into(stage: str, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return an index whose files are still in the stage."""
    return {**index, "weight_map": {weight: f"{stage}/{name}" for weight, name in index["weight_map"].items()}}


def index_text(index: Mapping[str, Any]) -> str:
    """Return an index as it is written."""
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def _publish_shards(stage: Path, target: Path, files: Sequence[str], index: Mapping[str, Any]) -> None:
    folder = target.parent
    if not any((folder / name).exists() for name in files):
        for name in files:
            (stage / name).replace(folder / name)
    else:
        # The names are taken by shards of the old index. So the index points into the stage until all of them are
        # replaced: a program that is killed here leaves weights that are whole and can be read.
        _put_index(stage, target, index_into(stage.name, index))
        for name in files:
            twin = _twin(stage / name)
            twin.replace(folder / name)
    sync(folder)
    _put_index(stage, target, index)


def _is_in_use(stage: Path, index: Path) -> bool:
    return index.is_file() and stage.name in index.read_text(encoding="utf-8")


def _put_index(stage: Path, target: Path, index: Mapping[str, Any]) -> None:
    written = stage / target.name
    written.write_text(index_text(index), encoding="utf-8")
    sync(written)
    written.replace(target)
    sync(target.parent)


def _twin(file: Path) -> Path:
    """Give a file a second name; a copy where the disk knows no such thing."""
    twin = file.with_name(f"{file.name}.twin")
    try:
        twin.hardlink_to(file)
    except OSError:
        shutil.copyfile(file, twin)
        sync(twin)
    return twin
