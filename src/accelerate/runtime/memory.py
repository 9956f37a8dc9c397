"""Give memory back, and detect that it ran out."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from typing import Any

import torch

from accelerate.devices import registry
from accelerate.runtime import current

_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "can't allocate memory",
    "not enough memory",
    "RESOURCE_EXHAUSTED",
)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the device's cached memory back; collect garbage first if asked."""
    if garbage_collection:
        gc.collect()
        _wait_for_prefetch_threads()
    active = current.active()
    backend = active.backend if active is not None else registry.default().value
    backend.empty_cache()


def _wait_for_prefetch_threads() -> None:
    # A thread that is loading a weight keeps all weights of its model alive. Locking one thread after the other is not
    # enough: a thread that was idle may begin to load while another one is waited for. Sorted, so that two callers
    # cannot wait for each other.
    with contextlib.ExitStack() as idle:
        for thread in sorted(current.PREFETCH_THREADS, key=id):
            if thread.is_alive():  # after a fork, those of the parent are not, and nothing releases their locks
                idle.enter_context(thread.busy)


def trim_host_memory() -> None:
    """Give host memory that was freed between blocks that are still in use back to the system, where the C library can.

    glibc keeps blocks of up to 32 MB for later, and aligned ones rarely fit where one of the same size was.
    """
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def trim_holes(limit: int) -> None:
    """Give freed host memory back to the system if there is more of it than `limit` bytes, where the C library can.

    Activations of changing sizes leave holes in what glibc keeps, which no later one fits into.
    """
    look = _of_c_library("mallinfo2")
    if look is None:
        return
    look.restype = _MallocInfo
    if look().fordblks > limit:
        trim_host_memory()


class _MallocInfo(ctypes.Structure):
    """What glibc (from 2.33 on) says of the memory that it manages; `fordblks` are the free bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


@functools.cache
def _of_c_library(name: str) -> Any:
    """Return a function of the C library, None where it has no such one."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


def release_memory(*objects: Any) -> list[Any]:
    """Drop the references to `objects` and free what they held; assign the result to the names that held them.

    Example:
        ```python
        a, b = torch.ones(1000, 1000), torch.ones(1000, 1000)
        a, b = release_memory(a, b)
        ```
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return whether an exception says that memory ran out, so that a smaller batch may work."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(exception, RuntimeError) or not exception.args:
        return False
    text = str(exception.args[0])
    return any(phrase.lower() in text.lower() for phrase in _OUT_OF_MEMORY_TEXTS)
