"""What the kernel is told about mapped memory: which pages come next, and which are done with."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import torch

from accelerate._base import pages

# Small enough that a thread that reads ahead notices soon that it is not needed any more.
_CHUNK = 32 * 2**20


def _pages_around(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of all pages that a tensor touches."""
    start = tensor.data_ptr()
    return start - start % mmap.PAGESIZE, start + tensor.nbytes


def _pages_inside(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the pages that belong to a tensor alone."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return start + -start % mmap.PAGESIZE, end - end % mmap.PAGESIZE


def announce(tensor: torch.Tensor) -> None:
    """Let the kernel start to read the pages of a mapped tensor, without waiting for them."""
    if tensor.nbytes and hasattr(mmap, "MADV_WILLNEED"):
        pages.advise(*_pages_around(tensor), mmap.MADV_WILLNEED)


def bring(tensor: torch.Tensor) -> None:
    """Read the pages of a mapped tensor into memory and put them into the page table; returns when they are there.

    To announce them before would cost half as much processor time again, which the module that runs needs. Only where
    the kernel cannot populate are they announced, and come when they are used.
    """
    if not tensor.nbytes:
        return
    start, end = _pages_around(tensor)
    for chunk in range(start, end, _CHUNK):
        if not pages.populate(chunk, min(chunk + _CHUNK, end) - chunk):
            announce(tensor)
            return


def let_go(tensor: torch.Tensor, path: str | os.PathLike[str], offset: int) -> None:
    """Give the pages of a mapped tensor back to the system, which reads them from the file if they are used again.

    What was written to them through a private mapping is lost, so this is for tensors that nobody wrote to.

    Args:
        path: The file that is mapped.
        offset: Where the tensor begins in it.
    """
    start, end = _pages_inside(tensor)
    if end <= start or not hasattr(mmap, "MADV_DONTNEED") or not pages.advise(start, end, mmap.MADV_DONTNEED):
        return
    if hasattr(os, "posix_fadvise"):
        # Pages that another process has mapped stay. A file that is gone has nothing to be dropped.
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, offset + start - tensor.data_ptr(), end - start, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
