"""Requests to the kernel about the pages of memory that is mapped."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from contextlib import suppress

# Linux 5.14; Python's mmap module has no names for them.
_POPULATE_READ, _POPULATE_WRITE = 22, 23


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system call that gives advice, or None on a system without it.

    `mmap.mmap.madvise` keeps the interpreter's lock while pages are read; a foreign function does not.
    """
    with suppress(AttributeError, OSError, TypeError):
        call = ctypes.CDLL(None, use_errno=True).madvise
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        call.restype = ctypes.c_int
        return call
    return None


def advise(start: int, end: int, advice: int) -> bool:
    """Give advice for the pages between two addresses, the first of which begins a page; return whether it was taken."""
    call = _madvise()
    return call is not None and end > start and call(start, end - start, advice) == 0


def populate(address: int, nbytes: int) -> bool:
    """Bring the pages of mapped memory, and return whether they came: a broken disk or a cut file is no signal here."""
    return advise(address - address % mmap.PAGESIZE, address + nbytes, _POPULATE_READ)


def populate_fresh(address: int, nbytes: int) -> None:
    """Get the pages of memory that is about to be written all at once, where the kernel can: one by one takes longer."""
    advise(address - address % mmap.PAGESIZE, address + nbytes, _POPULATE_WRITE)


@functools.cache
def can_populate() -> bool:
    """Return whether the kernel brings the pages of a mapping on request, and says if it cannot."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        return populate(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE)
