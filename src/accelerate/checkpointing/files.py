"""The files of a checkpoint: written with a checksum and synced, and compared with their records later.

A CRC of all bytes takes longer than to load a checkpoint. So the bytes are taken as rows of words; a CRC is made of the
sums of the columns, segment by segment, and of the bytes that are left at the end. Every change of a byte changes it, and
so does data that is missing, in another order, or zero. A row is not as long as a page of memory or a sector of a disk:
two of them that changed places are noticed too. It is no protection against somebody who wants to deceive.
"""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy

from accelerate._base import pages
from accelerate._base.errors import ConfigurationError, printable
from accelerate._base.untrusted import check_regular, is_whole, path_inside, shown
from accelerate.offload.safetensors_format import write_safetensors
from accelerate.runtime.atomic import partial_name, remove_abandoned, sync

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from typing_extensions import Self

_LOG = logging.getLogger(__name__)
_MISSING = "it is missing"
T = TypeVar("T")
_COLUMNS, _ROWS = 509, 64
_SEGMENT = _COLUMNS * _ROWS * 8
_READ_AT_ONCE = 32 * _SEGMENT
_MAPPED_AT_ONCE = 1024 * _SEGMENT
_WORD = numpy.dtype("<u8")
_METHOD = "column-sums"
_OVERLAP_FROM = 2**20
"""Pieces of this size are summed in a second thread while they are written."""


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: its path in the folder, its size in bytes and the checksum of its bytes.

    Raises:
        ConfigurationError: (a ValueError) if the path leads out of the folder, or the others are no size and no checksum.
    """

    name: str
    size: int
    checksum: str

    def __post_init__(self) -> None:
        path_inside(Path(), self.name, "A manifest")
        if not is_whole(self.size) or not isinstance(self.checksum, str):
            raise ConfigurationError(
                f"A manifest gives {shown(self.name)} the size {shown(self.size)} and the checksum {shown(self.checksum)}, "
                "and one of them cannot be. Use another checkpoint."
            )

    @classmethod
    def of(cls, file: Path, folder: Path) -> FileRecord:
        """Wait until a file is on the disk, and return its record."""
        sync(file)
        return cls(file.relative_to(folder).as_posix(), file.stat().st_size, checksum(file))

    def problem(self, folder: Path, *, checksums: bool) -> FileProblem | None:
        """Return what is wrong with the file now; None if it is what was written.

        Args:
            checksums: Read the whole file, and do not trust its size.
        """
        path = folder / self.name
        try:
            size = check_regular(path).st_size
            if size != self.size:
                return FileProblem(self.name, f"it has {size} bytes instead of {self.size}")
            if checksums and checksum(path) != self.checksum:
                return FileProblem(self.name, "its bytes have changed since it was written (checksum)")
        except FileNotFoundError:
            return FileProblem(self.name, _MISSING)
        except ConfigurationError:
            return FileProblem(self.name, "it is no file")
        except OSError as error:
            return FileProblem(self.name, f"it cannot be read ({error.strerror})")
        return None


@dataclass(frozen=True)
class FileProblem:
    """What is wrong with a file of a checkpoint."""

    file: str
    reason: str

    @property
    def is_missing(self) -> bool:
        """Whether the file does not exist."""
        return self.reason == _MISSING

    def __str__(self) -> str:
        return f"{printable(self.file)}: {self.reason}"


class Checksum:
    """Sum bytes as they come."""

    def __init__(self) -> None:
        self._crc = 0
        self._rest = bytearray()

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        begin = 0
        if self._rest:
            begin = min(_SEGMENT - len(self._rest), len(data))
            self._rest += data[:begin]
            if len(self._rest) < _SEGMENT:
                return
            self._add(memoryview(self._rest))
            self._rest = bytearray()
        end = len(data) - (len(data) - begin) % _SEGMENT
        if begin < end:
            self._add(data[begin:end])
        self._rest += data[end:]

    def _add(self, segments: memoryview) -> None:
        # One call for all: other threads run while numpy sums, and hardly in between.
        words = numpy.frombuffer(segments, _WORD).reshape(-1, _ROWS, _COLUMNS)
        self._crc = zlib.crc32(numpy.add.reduce(words, axis=1).astype(_WORD, copy=False).data, self._crc)

    def __str__(self) -> str:
        return f"{_METHOD}:{zlib.crc32(self._rest, self._crc):08x}"


def checksum(path: Path) -> str:
    """Return the checksum of a file's bytes, summed where the kernel has them if it can map the file safely.

    Raises:
        OSError: If it cannot be read.
    """
    total = Checksum()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < _SEGMENT or not pages.can_populate():
            buffer = memoryview(bytearray(_READ_AT_ONCE))
            while count := file.readinto(buffer):
                total.update(buffer[:count])
            return str(total)
        # Not closed by hand: that is refused as long as an error holds a part of it.
        content = numpy.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), numpy.uint8)
    for begin in range(0, size, _MAPPED_AT_ONCE):
        piece = content[begin : begin + _MAPPED_AT_ONCE]
        # Asked for before they are touched: a disk that fails is then an error, and not the end of the process.
        if not pages.populate(piece.ctypes.data, piece.nbytes):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        total.update(piece.data)
    return str(total)


class WorkerThread:
    """Run functions in the order given.

    The pools of `concurrent.futures` take no work once the interpreter begins to end, and a save may still be running
    then. This thread starts when the object is made and ends when it is closed.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a function soon; the future has its result or its exception."""
        future: Future[T] = Future()
        self._jobs.put((future, function))
        return future

    def close(self) -> None:
        """End once everything that was submitted has run."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the owner sees it at `result()`
                future.set_exception(error)
            del job, future, function  # while it waits for the next one, nothing of the last one stays in memory


class PendingSave:
    """A checkpoint that is being written while training goes on.

    The thread is not a daemon: a program that ends meanwhile waits for its last checkpoint.

    Args:
        target: The folder of the checkpoint.
        work: Writes and publishes it.
    """

    def __init__(self, target: Path, work: Callable[[], None]) -> None:
        self.target = target
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="accelerate-save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the program waits
            self._error = error
            # Said now as well, because a program may end without waiting.
            _LOG.error("%s", error)

    def wait(self) -> Path:
        """Wait for the end and return the folder of the checkpoint.

        Raises:
            CheckpointError: If it could not be saved.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.target


class FolderWriter:
    """Write files into a folder, and keep a record of each.

    Checksums are made from the memory that is written, in a second thread; a third one waits for the disk.

    Args:
        path: The folder; it exists.
        process_group: Over which the ranks that write together talk meanwhile; the default one if None.
    """

    def __init__(self, path: Path, process_group: dist.ProcessGroup | None = None) -> None:
        self.path = path
        self.process_group = process_group
        self._summing = WorkerThread("accelerate-checksum")
        self._syncing = WorkerThread("accelerate-fsync")
        self._records: list[Future[FileRecord]] = []
        remove_abandoned(path)

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write a flat mapping of tensors as safetensors."""
        with _SummedFile(self.path / name, self._summing) as file:
            write_safetensors(file, tensors, metadata)
        self._sync(name, file)

    def write_torch(self, name: str, value: object, owner: str = "") -> None:
        """Write an object with `torch.save`.

        Args:
            owner: Whose state it is, if a program decides what is in it: it is told if `load_state` will not read that.
        """
        import torch  # not above: `accelerate checkpoints` reads records without it

        with _SummedFile(self.path / name, self._summing) as file:
            try:
                # A file object lets other threads run while it writes; torch's own writer of paths does not.
                torch.save(value, cast("Any", file))
            except RuntimeError as error:
                raise file.error or error from error  # torch does not tell what went wrong with the file
        if owner:
            from accelerate.checkpointing.torch_files import is_plain, warn_if_refused

            if not is_plain(value):
                warn_if_refused(self.path / name, owner)
        self._sync(name, file)

    def write_json(self, name: str, value: object) -> None:
        """Write a value as JSON."""
        self.write_text(name, json.dumps(value, indent=2) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text."""
        with _SummedFile(self.path / name, self._summing) as file:
            file.write(text.encode())
        self._sync(name, file)

    def _sync(self, name: str, file: _SummedFile) -> None:
        self._records.append(self._syncing.submit(partial(file.synced_record, name)))

    def add_written(self, path: Path) -> None:
        """Record a file, or the files of a sub-folder, that somebody else has written here."""
        files = sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]
        self._records += [self._syncing.submit(partial(FileRecord.of, file, self.path)) for file in files]

    def finish(self) -> list[FileRecord]:
        """Wait until everything is on the disk, and return the records of what was written."""
        return [record.result() for record in self._records]

    def close(self) -> None:
        """End the threads."""
        self._summing.close()
        self._syncing.close()


class _SummedFile:
    """A file that sums what is written to it, and takes the place of another when its block ends well.

    What is at its place is never opened: a link there may lead anywhere.
    """

    def __init__(self, path: Path, thread: WorkerThread) -> None:
        self.path = path
        self.size = 0
        self.checksum = Checksum()
        self.error: OSError | None = None
        self._thread = thread
        path.parent.mkdir(parents=True, exist_ok=True)
        self._partial = path.with_name(partial_name(path.name))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(self._partial, flags, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        os.close(self._descriptor)
        try:
            if kind is None:
                self._partial.replace(self.path)
        finally:
            self._partial.unlink(missing_ok=True)

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        view = memoryview(data).cast("B")
        if len(view) >= _OVERLAP_FROM:
            summed = self._thread.submit(partial(self.checksum.update, view))
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

    def synced_record(self, name: str) -> FileRecord:
        """Wait until the file is on the disk, and return its record."""
        sync(self.path)
        return FileRecord(name, self.size, str(self.checksum))
