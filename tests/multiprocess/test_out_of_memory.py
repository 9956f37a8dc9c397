"""Memory that runs out on one rank makes the batch smaller on all, and the update stays the same."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.processes import run_group

from accelerate import Accelerator, PartialState, find_executable_batch_size
from accelerate._base.errors import UsageError
from accelerate.runtime.gradient_clock import GradientState

pytestmark = pytest.mark.multiprocess
ROWS = 96


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(batch_size: int, largest: int, steps: int = 1) -> tuple[list[float], int]:
    """Train on all rows; the last rank runs out of memory in its second batch while the others are in backward."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    accelerator.free_memory()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = 0
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            outputs = model(batch)
            if accelerator.is_last_process and batch_size > largest and index == 0:
                raise torch.OutOfMemoryError("the device is full")
            accelerator.backward(outputs.square().mean())
            optimizer.step()
            optimizer.zero_grad()
            updates += accelerator.sync_gradients
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    total = accelerator.reduce(torch.ones(1), "sum")  # the group works after it was made anew
    assert total.item() == accelerator.num_processes
    return weights.tolist(), updates


def shrinks_on_all_ranks() -> dict[str, Any]:
    gc.freeze()  # every try collects garbage; what came with the fork need not be looked through each time
    lines = Lines()
    logging.getLogger("accelerate.collectives.out_of_memory").addHandler(lines)
    tried: list[tuple[int, int]] = []

    @find_executable_batch_size(starting_batch_size=16, keep_update=True)
    def attempt(batch_size: int) -> Any:
        # A new Accelerator takes over how much the window has grown.
        tried.append((batch_size, Accelerator().gradient_accumulation_steps))
        return train(batch_size, largest=4)

    weights, updates = attempt()
    again = attempt()[0]
    GradientState().grow(1)
    return {
        "tried": tried,
        "weights": weights,
        "again": again,
        "updates": updates,
        "small": train(4, largest=4, steps=4)[0],
        "big": train(16, largest=16)[0],
        "lines": list(lines.lines),
    }


def without_collectives() -> Any:
    state, tried = PartialState(), []

    @find_executable_batch_size(starting_batch_size=20)
    def attempt(batch_size: int, word: str, *, other: int) -> Any:
        tried.append(batch_size)
        if state.is_last_process and batch_size > 15:
            raise RuntimeError("CUDA out of memory. Tried to allocate everything")
        return batch_size, word, other

    return attempt("word", other=3), tried


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def reaches_the_floor() -> str:
    @find_executable_batch_size(starting_batch_size=8, minimum_batch_size=4, keep_update=True)
    def attempt(batch_size: int) -> Any:
        return train(batch_size, largest=1)

    message = raised(attempt)
    GradientState().grow(1)
    return message


def fails_in_a_collective() -> str:
    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> Any:
        accelerator = Accelerator()
        if accelerator.is_last_process:
            raise ValueError("a fault of the program")
        accelerator.wait_for_everyone()

    return raised(attempt)


def fails_beside_the_others() -> str:
    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> Any:
        if PartialState().is_last_process:
            raise KeyError("missing")

    return raised(attempt)


def all_checks() -> dict[str, Any]:
    found: dict[str, Any] = {
        "shrinks": shrinks_on_all_ranks(),
        "without": without_collectives(),
        "floor": reaches_the_floor(),
        "fault": fails_in_a_collective(),
    }
    Accelerator().reset()  # the group is broken now
    found["beside"] = fails_beside_the_others()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_group(all_checks, 2)


def check_shrinking(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["tried"] == [(16, 1), (8, 2), (4, 4), (4, 4)]  # the size that fits is kept for the next call
        assert result["updates"] == ROWS // (16 * len(results))
        assert result["weights"] == results[0]["weights"] == result["again"]
        assert result["weights"] == result["small"]
        torch.testing.assert_close(torch.tensor(result["weights"]), torch.tensor(result["big"]))
        assert [line.split(";")[0] for line in result["lines"]] == [
            "Memory ran out with batch size 16",
            "Memory ran out with batch size 8",
        ]


def test_one_rank_without_memory_shrinks_the_batch_of_all_and_keeps_the_update(found: list[dict[str, Any]]) -> None:
    check_shrinking([result["shrinks"] for result in found])


def test_three_ranks() -> None:
    check_shrinking(run_group(shrinks_on_all_ranks, 3))


def test_a_function_without_collectives(found: list[dict[str, Any]]) -> None:
    # 20, then nine tenths of the last, rounded down, on both ranks.
    assert [result["without"] for result in found] == [((14, "word", 3), [20, 18, 16, 14])] * 2


def test_the_floor_is_an_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["floor"].startswith(f"{UsageError.__name__}: No batch size from 8 down to 4 fits")


def test_another_error_stops_all_ranks_and_is_named(found: list[dict[str, Any]]) -> None:
    assert found[1]["fault"] == "ValueError: a fault of the program"
    assert found[0]["fault"].startswith("UsageError: Inside find_executable_batch_size rank 1 failed with ValueError")
    assert "a fault of the program" in found[0]["fault"]
    assert found[1]["beside"] == "KeyError: 'missing'"
    assert "rank 1 failed with KeyError: 'missing'" in found[0]["beside"]
