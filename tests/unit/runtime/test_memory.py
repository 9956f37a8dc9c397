"""Memory that ran out is recognised, and given back."""

from __future__ import annotations

import gc
import platform
import weakref
from pathlib import Path

import pytest
import torch

from accelerate.runtime.memory import clear_device_cache, release_memory, should_reduce_batch_size, trim_holes


class CudaLikeError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("whatever"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("XPU out of memory."), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (CudaLikeError("RESOURCE_EXHAUSTED: too much"), True),
        (RuntimeError("shapes do not match"), False),
        (RuntimeError(), False),
        (RuntimeError(17), False),
        (ValueError("CUDA out of memory."), False),
        (KeyError("out of memory"), False),
    ],
)
def test_should_reduce_batch_size(error: BaseException, expected: bool) -> None:
    assert should_reduce_batch_size(error) is expected


def test_a_real_allocation_that_is_too_big_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert should_reduce_batch_size(caught.value)


class Node:
    other: Node


def test_release_memory_frees_also_cycles() -> None:
    left, right = Node(), Node()
    left.other, right.other = right, left
    seen = weakref.ref(left)
    gc.disable()
    try:
        assert release_memory(left, right) == [None, None]
        left, right = None, None  # type: ignore[assignment]
        assert seen() is not None
        clear_device_cache()
        assert seen() is not None
        clear_device_cache(garbage_collection=True)
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library keeps its memory otherwise")
def test_holes_go_back_to_the_system_once_they_are_large() -> None:
    def held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    # Small enough to be no mapping of its own each.
    blocks = [torch.ones(20_000) for _ in range(1000)]
    del blocks[::2]
    before = held()
    trim_holes(10**12)
    assert held() > before - 10 * 10**6
    trim_holes(10**6)
    assert held() < before - 30 * 10**6
    assert all(block.sum() == 20_000 for block in blocks)
