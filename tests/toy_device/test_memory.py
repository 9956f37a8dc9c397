"""The toy device runs out of memory: batches shrink until they fit, and nothing is left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.support.toy_device import on_the_cpu, on_toy

from accelerate import Accelerator, PartialState, find_executable_batch_size
from accelerate.runtime.gradient_clock import GradientState
from accelerate.runtime.memory import clear_device_cache, should_reduce_batch_size
from accelerate.utils import find_batch_size, release_memory

KIB = 1024
FEATURES, HIDDEN = 16, 512
ROWS = 64


def train(batch_size: int) -> torch.Tensor:
    """Train on all rows; the larger a batch, the more its activations take."""
    accelerator = Accelerator()
    accelerator.free_memory()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        assert find_batch_size({"rows": batch}) == batch_size
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


@on_toy()
def test_an_error_of_the_device_is_one_of_memory() -> None:
    torch.toy.set_memory_limit(0, KIB)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(KIB, device="toy")
    assert should_reduce_batch_size(caught.value)
    assert should_reduce_batch_size(RuntimeError(str(caught.value)))


def limit_for(batch_size: int, update: int | None = None) -> int:
    """Return an amount of memory in which this batch size fits, and twice the size does not.

    Args:
        update: The samples of an update, over which gradients are held.
    """
    device, peaks = PartialState().device, []
    for size in (batch_size, 2 * batch_size):
        GradientState().grow(1 if update is None else update // size)
        torch.accelerator.reset_peak_memory_stats(device)
        train(size)
        peaks.append(torch.accelerator.max_memory_allocated(device))
    Accelerator().free_memory()
    GradientState().grow(1)
    assert peaks[1] > peaks[0] + 16 * KIB
    return sum(peaks) // 2


@on_toy()
def test_batches_shrink_until_they_fit() -> None:
    with on_the_cpu():
        expected = train(8)
    torch.toy.set_memory_limit(0, limit_for(8))
    with pytest.raises(torch.OutOfMemoryError):
        train(64)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=64, reduce_batch_size_fn=lambda: tried[-1] // 2)
    def attempt(batch_size: int) -> torch.Tensor:
        tried.append(batch_size)
        return train(batch_size)

    found = attempt()
    assert tried == [64, 32, 16, 8]
    assert torch.equal(found, expected)
    Accelerator().free_memory()
    release_memory()
    assert torch.accelerator.memory_allocated() == 0


@on_toy(processes=2)
def test_memory_that_runs_out_on_one_device_shrinks_the_batch_on_both() -> None:
    with on_the_cpu():
        expected = train(32)
    state, tried = PartialState(), list[tuple[int, int]]()
    limit = limit_for(8, update=32)
    if state.is_last_process:
        torch.toy.set_memory_limit(state.device.index, limit)

    @find_executable_batch_size(starting_batch_size=32, keep_update=True)
    def attempt(batch_size: int) -> torch.Tensor:
        tried.append((batch_size, Accelerator().gradient_accumulation_steps))
        return train(batch_size)

    found = attempt()
    assert tried == [(32, 1), (16, 2), (8, 4)]
    accelerator = Accelerator()
    GradientState().grow(1)
    torch.toy.set_memory_limit(state.device.index, 1024**3)
    # The whole dataset in one update, as the first size has it; the group works after it was made anew.
    torch.testing.assert_close(found, expected)
    assert torch.equal(train(32), expected)
    gathered = accelerator.gather(found[None, :4].to(accelerator.device))
    assert torch.equal(gathered[0], gathered[1])


@pytest.mark.parametrize("processes", [1, 2])
@on_toy()
def test_a_search_that_finds_nothing_says_so_and_leaves_the_device_usable(processes: int) -> None:
    with on_the_cpu():
        assert PartialState().num_processes == processes
        expected = train(16)
    state = PartialState()
    assert (state.device.type, state.num_processes) == ("toy", processes)
    # Nothing fits; a size below the smallest that is allowed would.
    for minimum, sizes, limit in ((1, [64, 32, 16, 8, 4, 2, 1], KIB), (16, [64, 32, 16], limit_for(8))):
        tried: list[int] = []
        if state.is_last_process:
            torch.toy.set_memory_limit(state.device.index or 0, limit)

        @find_executable_batch_size(
            starting_batch_size=64, reduce_batch_size_fn=lambda sizes=tried: sizes[-1] // 2, minimum_batch_size=minimum
        )
        def attempt(batch_size: int, tried: list[int] = tried) -> torch.Tensor:
            tried.append(batch_size)
            return train(batch_size)

        with pytest.raises(RuntimeError, match=f"No batch size from 64 down to {minimum} fits"):
            attempt()
        assert tried == sizes
        torch.toy.set_memory_limit(state.device.index or 0, 1024**3)
    release_memory()
    assert torch.equal(train(16), expected)


@on_toy()
def test_cached_memory_is_given_back() -> None:
    tensor = torch.ones(KIB, device="toy")
    held = [torch.ones(KIB, device="toy") for _ in range(3)]
    (nothing,) = release_memory(tensor)
    assert nothing is None
    del tensor
    assert torch.accelerator.memory_reserved() == 16 * KIB
    clear_device_cache()
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated() == 12 * KIB
    ring: list[Any] = [held]
    ring.append(ring)
    del held, ring
    clear_device_cache(garbage_collection=True)
    assert torch.accelerator.memory_reserved() == 0


@on_toy()
def test_a_run_leaves_nothing_on_the_device() -> None:
    start = torch.accelerator.memory_allocated()
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            optimizer.zero_grad()
    assert torch.accelerator.memory_allocated() > start
    model, optimizer, loader, batch = accelerator.free_memory(model, optimizer, loader, batch)
    gc.collect()
    assert torch.accelerator.memory_allocated() == start
    clear_device_cache()
    assert torch.accelerator.memory_reserved() == start
