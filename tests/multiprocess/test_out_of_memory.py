"""Memory that runs out on one rank makes the batch smaller on all, and the update stays the same."""

from __future__ import annotations

import gc
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import run_group

from accelerate import Accelerator, PartialState, find_executable_batch_size
from accelerate._base.errors import UsageError
from accelerate.collectives import out_of_memory
from accelerate.runtime import process_group
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


def runs_out_on_all_ranks() -> dict[str, Any]:
    """Run out of memory ten times on every rank, in turn before and after the others."""
    state, before, tried, collected = PartialState(), torch.distributed.group.WORLD, [], []

    @find_executable_batch_size(starting_batch_size=128)
    def attempt(batch_size: int) -> int:
        tried.append(batch_size)
        if len(tried) < 11:
            if len(tried) % state.num_processes == state.process_index:
                time.sleep(0.02)
            raise torch.OutOfMemoryError("the device is full")
        return batch_size

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            collected.append(len(tried))

    gc.disable()  # what is collected is collected on purpose
    gc.callbacks.append(count)
    try:
        fits = attempt()
    finally:
        gc.callbacks.remove(count)
        gc.enable()
    is_same_group = torch.distributed.group.WORLD is before
    return {"fits": fits, "tried": tried, "collected": collected, "same group": is_same_group, "met": ranks_met()}


def raised(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ranks_met() -> list[float]:
    """Return what a collective over all ranks gives, if the group can be used."""
    return Accelerator().gather(torch.tensor([float(PartialState().process_index)])).tolist()


def reaches_the_floor() -> tuple[str, list[str]]:
    lines = Lines()
    logging.getLogger("accelerate.collectives.out_of_memory").addHandler(lines)

    @find_executable_batch_size(starting_batch_size=8, minimum_batch_size=4, keep_update=True)
    def attempt(batch_size: int) -> Any:
        return train(batch_size, largest=1)

    message = raised(attempt)
    GradientState().grow(1)
    return message, lines.lines


class Pruned(Exception):
    """What a program catches on every rank to go on with something else."""


def is_given_up_on_all_ranks() -> tuple[list[str], bool, list[float]]:
    """Fail on all ranks, in the first of three calls right away, in the second one rank after the other."""
    state, before = PartialState(), torch.distributed.group.WORLD

    def attempt(batch_size: int, call: int) -> list[float]:
        if call == 1:
            Accelerator().wait_for_everyone()
            time.sleep(0.3 * state.process_index)  # the others' reports are there before this one's error
        if call < 2:
            raise Pruned(f"call {call}, rank {state.process_index}")
        return ranks_met()

    find = find_executable_batch_size(attempt, starting_batch_size=8)
    messages = [raised(lambda call=call: find(call)) for call in range(2)]
    return messages, torch.distributed.group.WORLD is before, find(2)


def fails_in_a_collective() -> tuple[str, list[float]]:
    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> Any:
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 1))  # what is wrapped for the group that breaks stays alive
        accelerator.backward(model(torch.ones(1, 2)).sum())
        if accelerator.is_last_process:
            raise ValueError("a fault of the program")
        accelerator.wait_for_everyone()

    return raised(attempt), ranks_met()


def fails_beside_the_others() -> tuple[str, bool, list[float]]:
    before = torch.distributed.group.WORLD

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> Any:
        if PartialState().is_last_process:
            raise KeyError("missing")

    return raised(attempt), torch.distributed.group.WORLD is before, ranks_met()


def _wait(name: str, seconds: float) -> None:
    """Set how long ranks wait for each other; this process ends with its checks, so nothing is put back."""
    pytest.MonkeyPatch().setattr(out_of_memory, name, seconds)


def fails_while_another_computes(sign: Path) -> str:
    """Fail on rank 1, while rank 0 computes until rank 1 has gone on."""
    _wait("_PATIENCE_SECONDS", 0.1)
    _wait("_GRACE_SECONDS", 0.1)
    state = PartialState()

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> Any:
        if state.is_last_process:
            raise KeyError("missing")
        while not sign.exists():
            time.sleep(0.01)

    message = raised(attempt)
    sign.touch()
    return message


def hangs_up_on_connections_with_old_numbers() -> tuple[bool, str, list[float]]:
    """Remake the group while sockets close that were open before, as gloo's own do when its thread comes late."""
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 1))  # keeps the first group, and so the numbers of its sockets
    late = [socket.socket() for _ in range(8)]
    numbers = {closed.fileno() for closed in late}
    init_process_group = torch.distributed.init_process_group

    def close_and_init(**options: Any) -> None:
        for closed in late:
            closed.close()
        init_process_group(**options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "init_process_group", close_and_init)
        process_group.remake()
    taken_over = any(Path(f"/proc/self/fd/{number}").exists() for number in numbers)

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> None:
        if accelerator.is_last_process and batch_size == 8:
            raise torch.OutOfMemoryError("the device is full")
        accelerator.wait_for_everyone()

    error = raised(attempt)
    del model
    return taken_over, error, ranks_met()


def all_checks() -> dict[str, Any]:
    _wait("_GRACE_SECONDS", 120.0)
    found: dict[str, Any] = {
        "shrinks": shrinks_on_all_ranks(),
        "without": without_collectives(),
        "together": runs_out_on_all_ranks(),
        "floor": reaches_the_floor(),
        "fault": fails_in_a_collective(),
    }
    _wait("_PATIENCE_SECONDS", 120.0)
    found["pruned"] = is_given_up_on_all_ranks()
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
    assert results[0]["lines"] == [
        "Memory ran out with batch size 16; trying 8 on all ranks.",
        "Memory ran out with batch size 8; trying 4 on all ranks.",
    ]
    assert [result["lines"] for result in results[1:]] == [[]] * (len(results) - 1)


def test_one_rank_without_memory_shrinks_the_batch_of_all_and_keeps_the_update(found: list[dict[str, Any]]) -> None:
    check_shrinking([result["shrinks"] for result in found])


def check_failures(results: list[dict[str, Any]]) -> None:
    """Every failed rank has its own error, the others hear of it, and the group can be used."""
    ranks, last = list(range(len(results))), len(results) - 1
    for rank, result in enumerate(results):
        messages, is_same_group, met = result["pruned"]
        assert messages == [f"Pruned: call {call}, rank {rank}" for call in range(2)]
        assert is_same_group
        assert met == ranks
    for name, own in (("fault", "ValueError: a fault of the program"), ("beside", "KeyError: 'missing'")):
        assert results[last][name][0] == own
        for result in results[:last]:
            assert result[name][0].startswith(
                f"UsageError: Inside find_executable_batch_size rank {last} failed with {own}"
            )
        assert [result[name][-1] for result in results] == [ranks] * len(results)
    assert all(result["beside"][1] for result in results)


def check_together(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["tried"] == [128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41]
        assert result["fits"] == 41
        assert result["collected"] == list(range(11))  # once before the first try, and once after each that failed
        assert result["same group"]
        assert result["met"] == list(range(len(results)))


def test_ranks_that_run_out_together_try_again_at_once(found: list[dict[str, Any]]) -> None:
    check_together([result["together"] for result in found])


def test_three_ranks() -> None:
    found = run_group(all_checks, 3)
    check_shrinking([result["shrinks"] for result in found])
    check_together([result["together"] for result in found])
    check_failures(found)


def test_a_function_without_collectives(found: list[dict[str, Any]]) -> None:
    # 20, then nine tenths of the last, rounded down, on both ranks.
    assert [result["without"] for result in found] == [((14, "word", 3), [20, 18, 16, 14])] * 2


def test_the_floor_is_an_error_on_all_ranks(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["floor"][0].startswith(f"{UsageError.__name__}: No batch size from 8 down to 4 fits")
    assert [result["floor"][1] for result in found] == [
        [
            "Memory ran out with batch size 8; trying 4 on all ranks.",
            "Memory ran out with batch size 4; there is no smaller one to try.",
        ],
        [],
    ]


def test_another_error_stops_all_ranks_and_leaves_them_a_group(found: list[dict[str, Any]]) -> None:
    check_failures(found)


def test_a_rank_hangs_up_on_connections_whose_numbers_were_in_use_before() -> None:
    assert run_group(hangs_up_on_connections_with_old_numbers, 2, timeout=120) == [(True, "nothing", [0.0, 1.0])] * 2


def test_an_error_is_not_kept_back_for_a_rank_that_computes(tmp_path: Path) -> None:
    found = run_group(fails_while_another_computes, 2, tmp_path / "sign")
    assert found[1] == "KeyError: 'missing'"
    assert found[0].startswith("UsageError: Inside find_executable_batch_size rank 1 failed with KeyError: 'missing'")
