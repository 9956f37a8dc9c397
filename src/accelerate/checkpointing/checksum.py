"""A checksum of files that costs less than reading them.

A CRC of all bytes takes longer than to load a checkpoint. So the bytes are taken as rows of words; a CRC is made of the
sums of the columns, segment by segment, and of the bytes that are left at the end. Every change of a byte changes it, and
so does data that is missing, in another order, or zero. A row is not as long as a page of memory or a sector of a disk:
two of them that changed places are noticed too. It is no protection against somebody who wants to deceive.
"""

from __future__ import annotations

import errno
import mmap
import os
import zlib
from io import FileIO
from pathlib import Path

import numpy

from accelerate._base import pages

_COLUMNS, _ROWS = 509, 64
_SEGMENT = _COLUMNS * _ROWS * 8
_READ_AT_ONCE = 32 * _SEGMENT
_MAPPED_AT_ONCE = 1024 * _SEGMENT
_WORD = numpy.dtype("<u8")
_METHOD = "column-sums"


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
    """Return the checksum of a file's bytes.

    Raises:
        OSError: If it cannot be read.
    """
    total = Checksum()
    with path.open("rb", buffering=0) as file:
        if not _add_mapped(total, file):
            buffer = memoryview(bytearray(_READ_AT_ONCE))
            while count := file.readinto(buffer):
                total.update(buffer[:count])
    return str(total)


def _add_mapped(total: Checksum, file: FileIO) -> bool:
    """Sum a file where the kernel has it, without a copy, and return whether that is possible.

    The pages are asked for before they are touched: a disk that fails is then an error, and not the end of the process.
    """
    size = os.fstat(file.fileno()).st_size
    if size < _SEGMENT or not pages.can_populate():
        return False
    # Not closed by hand: that is refused as long as an error holds a part of it.
    content = numpy.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), numpy.uint8)
    for begin in range(0, size, _MAPPED_AT_ONCE):
        piece = content[begin : begin + _MAPPED_AT_ONCE]
        if not pages.populate(piece.ctypes.data, piece.nbytes):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(file.name))
        total.update(piece.data)
    return True
