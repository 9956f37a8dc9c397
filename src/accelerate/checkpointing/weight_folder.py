"""Put the weight files of a model into a folder so that a reader finds the old ones or the new ones, never some of both.

The folder is on a disk, or at an address of fsspec such as a bucket, where a file can be replaced at once but not renamed.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from accelerate._base import constants
from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.imports import require
from accelerate.runtime.atomic import atomic_file, partial_name, remove_abandoned, sync
from accelerate.runtime.claims import claimed

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


def is_weights_of(file: Path, folder: Path) -> bool:
    """Return whether a file is one that a save into a folder replaces or removes."""
    return any(known.owns(file.name) for known in _FORMATS) and file.parent.resolve() == folder.resolve()


def open_folder(save_directory: str | PathLike[str]) -> WeightFolder:
    """Return the folder to save to, which need not be there yet.

    Raises:
        ConfigurationError: If there is a file in its place.
        MissingPackageError: If it is an address whose package is not installed.
    """
    if isinstance(save_directory, str) and "://" in save_directory:
        return RemoteFolder(save_directory)
    folder = Path(save_directory)
    if folder.exists() and not folder.is_dir():
        raise ConfigurationError(
            f"save_directory={fspath(save_directory)!r} is a file, and weights are written into a folder beside their "
            "index. Give the path of a folder; it is made if it is not there."
        )
    return LocalFolder(folder)


class WeightFolder(ABC):
    """Where weights are saved to: written to a stage, then put in place of those of an earlier save in either format.

    Attributes:
        path: Where it is, on a disk of this machine.
    """

    path: Path | None = None

    def __init__(self) -> None:
        self._stage_name = partial_name(mark=STAGE_MARK)

    def claimed(self) -> AbstractContextManager[None]:
        """Return a block inside which no other process may save here, where such a thing can be had."""
        return nullcontext()

    @abstractmethod
    def stage(self) -> AbstractContextManager[Path]:
        """Return a folder to write new weights to; what is in it goes away if writing them fails."""

    @abstractmethod
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
        try:
            # The names may be taken by shards of the old index. Then the index points into the stage until all of them
            # are replaced: a program that is killed here leaves weights that are whole and can be read.
            is_taken = index is not None and not self._names().isdisjoint(files)
            if index is not None and is_taken:
                moved = {weight: f"{self._stage_name}/{name}" for weight, name in index["weight_map"].items()}
                self._put_index(kind, {**index, "weight_map": moved})
            for name in files:
                self._put(name, is_taken)
            if index is not None:
                self._put_index(kind, index)
        except BaseException:
            self._discard(kind)
            raise
        kept = {*files, *([kind.index] if index is not None else ())}
        stale = [name for name in self._names() if name not in kept and any(known.owns(name) for known in _FORMATS)]
        # What is opened first goes first: an index whose shards are gone would be an error instead of nothing.
        first = {name for known in _FORMATS for name in (known.single, known.index)}
        self._remove(sorted(stale, key=lambda name: name not in first))

    @abstractmethod
    def _names(self) -> set[str]:
        """Return the names in the folder."""

    @abstractmethod
    def _put(self, name: str, is_staged_too: bool) -> None:
        """Put a staged file in place; it has to stay in the stage if an index points to it there."""

    @abstractmethod
    def _put_index(self, kind: WeightFormat, index: Mapping[str, Any]) -> None:
        """Replace the index at once, when what was put in place before is there for good."""

    @abstractmethod
    def _discard(self, kind: WeightFormat) -> None:
        """Give up: remove the stage, unless an index points into it."""

    @abstractmethod
    def _remove(self, names: Sequence[str]) -> None:
        """Remove files of earlier saves, and the stage."""


class LocalFolder(WeightFolder):
    """A folder on a disk of this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = self.path = folder
        self._stage = folder / self._stage_name

    def __str__(self) -> str:
        return str(self._folder)

    def claimed(self) -> AbstractContextManager[None]:
        return claimed(self._folder.resolve())

    @contextmanager
    def stage(self) -> Iterator[Path]:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stage.mkdir()
        try:
            yield self._stage
            sync(self._stage)
        except BaseException:
            shutil.rmtree(self._stage, ignore_errors=True)
            raise

    def take(self, file: Path, settle: Callable[[], object]) -> None:
        """Leave the file: the stage is on the disk that it is for."""

    def _names(self) -> set[str]:
        return {file.name for file in self._folder.iterdir()}

    def _put(self, name: str, is_staged_too: bool) -> None:
        source = self._stage / name
        if is_staged_too:
            source = source.with_name(f"{name}.twin")
            try:
                source.hardlink_to(self._stage / name)
            except OSError:  # a disk that knows no second names
                shutil.copyfile(self._stage / name, source)
                sync(source)
        source.replace(self._folder / name)

    def _put_index(self, kind: WeightFormat, index: Mapping[str, Any]) -> None:
        sync(self._folder)
        with atomic_file(self._folder / kind.index) as partial:
            partial.write_text(_index_text(index), encoding="utf-8")

    def _discard(self, kind: WeightFormat) -> None:
        index = self._folder / kind.index
        if not (index.is_file() and self._stage_name in index.read_text(encoding="utf-8")):
            shutil.rmtree(self._stage, ignore_errors=True)

    def _remove(self, names: Sequence[str]) -> None:
        sync(self._folder)
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        shutil.rmtree(self._stage, ignore_errors=True)
        remove_abandoned(self._folder, STAGE_MARK)
        remove_abandoned(self._folder)
        sync(self._folder)


class RemoteFolder(WeightFolder):
    """A folder at an address. One file at a time is on the local disk before it is sent.

    Args:
        address: Such as `"s3://bucket/folder"`; the package of the protocol must be installed.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        fsspec = require("fsspec", why=f"Saving to {address!r}")
        self._address = address
        try:
            self._files, root = fsspec.core.url_to_fs(address)
        except ImportError as error:
            raise MissingPackageError(
                f"Saving to {address!r} needs a package that is not there. fsspec says: {error}"
            ) from error
        except ValueError as error:
            raise ConfigurationError(
                f"Nothing can be saved to {address!r}: fsspec does not know the protocol ({error}). Give a folder, or an "
                'address such as "s3://bucket/folder".'
            ) from error
        self._root = root.rstrip("/")
        self._stage = f"{self._root}/{self._stage_name}"

    def __str__(self) -> str:
        return self._address

    @contextmanager
    def stage(self) -> Iterator[Path]:
        self._files.makedirs(self._root, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="accelerate-save-") as folder:
            try:
                yield Path(folder)
            except BaseException:
                self._remove([])
                raise

    def take(self, file: Path, settle: Callable[[], object]) -> None:
        """Send a file, and remove it here."""
        settle()
        self._files.makedirs(self._stage, exist_ok=True)
        self._files.put_file(str(file), f"{self._stage}/{file.name}")
        file.unlink()

    def _names(self) -> set[str]:
        self._files.invalidate_cache()
        return {path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)}

    def _put(self, name: str, is_staged_too: bool) -> None:
        self._files.cp_file(f"{self._stage}/{name}", f"{self._root}/{name}")

    def _put_index(self, kind: WeightFormat, index: Mapping[str, Any]) -> None:
        self._files.pipe_file(f"{self._root}/{kind.index}", _index_text(index).encode())

    def _discard(self, kind: WeightFormat) -> None:
        """Leave the stage: an index may point into it, and asking may fail as well."""

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._files.rm_file(f"{self._root}/{name}")
        with suppress(FileNotFoundError):
            self._files.rm(self._stage, recursive=True)


def _index_text(index: Mapping[str, Any]) -> str:
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
