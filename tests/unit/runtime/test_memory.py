"""Memory that ran out is recognised, and given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from accelerate.runtime.memory import clear_device_cache, release_memory, should_reduce_batch_size


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
