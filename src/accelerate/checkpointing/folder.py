"""The folder of a checkpoint in the making: what is written to it is checked and on the disk before it counts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from accelerate.checkpointing.checksum import Checksum, checksum
from accelerate.checkpointing.helper_thread import HelperThread
from accelerate.checkpointing.manifest import FileRecord
from accelerate.offload.safetensors_format import write_safetensors
from accelerate.runtime.atomic import sync

_OVERLAP_FROM = 2**20
"""Pieces of this size are summed in a second thread while they are written."""


class StagedFolder:
    """Write files, and keep a record of each.

    Checksums are made from the memory that is written, in a second thread; a third one waits for the disk.

    Args:
        path: The folder; it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._summing = HelperThread("accelerate-checksum")
        self._syncing = HelperThread("accelerate-fsync")
        self._records: list[Future[FileRecord]] = []

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write a flat mapping of tensors as safetensors."""
        with closing(_SummedFile(self.path / name, self._summing)) as file:
            write_safetensors(file, tensors, metadata)
        self._note(name, file)

    def write_torch(self, name: str, value: object) -> None:
        """Write an object with `torch.save`."""
        with closing(_SummedFile(self.path / name, self._summing)) as file:
            try:
                # A file object lets other threads run while it writes; torch's own writer of paths does not.
                torch.save(value, cast("Any", file))
            except RuntimeError as error:
                raise file.error or error from error  # torch does not tell what went wrong with the file
        self._note(name, file)

    def write_json(self, name: str, value: object) -> None:
        """Write a value as JSON."""
        with closing(_SummedFile(self.path / name, self._summing)) as file:
            file.write(json.dumps(value, indent=2).encode() + b"\n")
        self._note(name, file)

    def adopt(self, path: Path) -> None:
        """Record a file, or the files of a sub-folder, that somebody else has written here."""
        files = sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]
        self._records += [self._syncing.submit(partial(record_of, file, self.path)) for file in files]

    def finish(self) -> list[FileRecord]:
        """Wait until everything is on the disk, and return the records of what was written."""
        return [record.result() for record in self._records]

    def close(self) -> None:
        """End the helping threads."""
        self._summing.close()
        self._syncing.close()

    def _note(self, name: str, file: _SummedFile) -> None:
        def settle() -> FileRecord:
            sync(file.path)
            return FileRecord(name, file.size, str(file.checksum))

        self._records.append(self._syncing.submit(settle))


def record_of(file: Path, folder: Path) -> FileRecord:
    """Wait until a file is on the disk, and return its record."""
    sync(file)
    return FileRecord(file.relative_to(folder).as_posix(), file.stat().st_size, checksum(file))


class _SummedFile:
    """A file that sums what is written to it."""

    def __init__(self, path: Path, thread: HelperThread) -> None:
        self.path = path
        self.size = 0
        self.checksum = Checksum()
        self.error: OSError | None = None
        self._thread = thread
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        if len(view) >= _OVERLAP_FROM:
            summed = self._thread.submit(lambda: self.checksum.update(view))
            try:
                self._write_all(view)
            finally:
                summed.result()  # the memory is the caller's again after this call
        else:
            self.checksum.update(view)
            self._write_all(view)
        self.size += len(view)
        return len(view)

    def _write_all(self, view: memoryview) -> None:
        done = 0
        try:
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self.path))
            raise self.error from None

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def close(self) -> None:
        """Close the file; its size and its sum stay."""
        os.close(self._descriptor)
