"""Weights saved to an address of fsspec, such as a bucket, where a file can be replaced at once but not renamed."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.imports import require
from accelerate.checkpointing.weight_folder import STAGE_MARK, WeightFormat, index_into, index_text, stale_names
from accelerate.runtime.atomic import partial_name


def is_address(save_directory: object) -> bool:
    """Return whether a folder is given as `protocol://...`."""
    return isinstance(save_directory, str) and "://" in save_directory


class RemoteFolder:
    """A folder at an address. One file at a time is on the local disk before it is sent.

    Args:
        address: Such as `"s3://bucket/folder"`; the package of the protocol must be installed.
    """

    def __init__(self, address: str) -> None:
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
        self._stage = partial_name(mark=STAGE_MARK)

    def __str__(self) -> str:
        return self._address

    @contextlib.contextmanager
    def stage(self) -> Iterator[Path]:
        self._files.makedirs(self._root, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="accelerate-save-") as folder:
            try:
                yield Path(folder)
            except BaseException:
                self._remove_stage()
                raise

    def take(self, file: Path, settle: Callable[[], object]) -> None:
        """Send a file, and remove it here."""
        settle()
        self._files.makedirs(self._path(self._stage), exist_ok=True)
        self._files.put_file(str(file), self._path(self._stage, file.name))
        file.unlink()

    def publish(self, kind: WeightFormat, files: Sequence[str], index: Mapping[str, Any] | None) -> None:
        present = self._names()
        if index is not None and not present.isdisjoint(files):
            # As on a disk: the index points to the staged files while those of its own names are replaced.
            self._put_index(kind, index_into(self._stage, index))
        for name in files:
            self._files.cp_file(self._path(self._stage, name), self._path(name))
        if index is not None:
            self._put_index(kind, index)
        for name in stale_names(self._names(), kind, files, index):
            self._files.rm_file(self._path(name))
        self._remove_stage()

    def _put_index(self, kind: WeightFormat, index: Mapping[str, Any]) -> None:
        self._files.pipe_file(self._path(kind.index), index_text(index).encode())

    def _names(self) -> set[str]:
        self._files.invalidate_cache()
        return {path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._root, detail=False)}

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _remove_stage(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path(self._stage), recursive=True)
