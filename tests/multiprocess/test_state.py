"""Ranks, groups and process control on real groups of processes."""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_group, run_script

from accelerate import Accelerator, PartialState
from accelerate._base.errors import ConfigurationError
from accelerate.config.plugins.training import InitProcessGroupKwargs
from accelerate.state import AcceleratorState, DistributedType

pytestmark = pytest.mark.multiprocess


def ranks() -> dict[str, Any]:
    state = PartialState()
    assert dist.get_backend() == state.backend == "gloo"
    assert state.distributed_type is DistributedType.MULTI_CPU
    assert state.use_distributed
    return {
        "rank": (state.process_index, state.local_process_index, state.num_processes),
        "flags": (state.is_main_process, state.is_local_main_process, state.is_last_process),
    }


def listening_addresses() -> tuple[str, ...]:
    PartialState()
    dist.barrier()
    entries = psutil.Process().net_connections(kind="tcp")
    found = sorted(entry.laddr.ip for entry in entries if entry.status == psutil.CONN_LISTEN)
    dist.barrier()
    return tuple(found)


def test_a_group_on_the_loopback_address_listens_nowhere_else() -> None:
    first, second = run_group(listening_addresses, 2)
    # The first holds the store too.
    assert len(first) == len(second) + 1
    assert {*first, *second} == {"127.0.0.1"}


def decorators() -> dict[str, Any]:
    found = {}
    for name, control in (("partial", PartialState()), ("accelerator", Accelerator())):
        found[name] = [
            control.on_main_process(lambda: "ran")(),
            control.on_main_process()(lambda: "ran")(),
            control.on_local_main_process(lambda: "ran")(),
            control.on_last_process(lambda: "ran")(),
            control.on_process(process_index=1)(lambda: "ran")(),
            control.on_process(lambda: "ran", process_index=1)(),
            control.on_local_process(lambda: "ran", local_process_index=0)(),
        ]
    return found


def decorator_asks_at_call_time() -> bool:
    accelerator = Accelerator()
    function = accelerator.on_main_process(lambda: True)
    before = function()
    accelerator.state.process_index = 0 if before is None else 1
    try:
        return function() is not before
    finally:
        accelerator.state.process_index = int(os.environ["RANK"])


def first_comes_first(folder: str) -> list[bool]:
    """Each rank notes whether the first one's file was there when it entered the block."""
    state, seen = PartialState(), []
    for name, order in (("main", state.main_process_first), ("local", state.local_main_process_first)):
        marker = Path(folder, name)
        with order():
            seen.append(marker.exists())
            if state.is_main_process:
                time.sleep(0.2)  # the others would come by, if they did not wait
                marker.touch()
    return seen


def first_fails_and_the_others_go_on() -> str:
    state = PartialState()
    try:
        with state.main_process_first():
            if state.is_main_process:
                raise ValueError("the first one failed")
        return "went on"
    except ValueError as error:
        return str(error)


def printed() -> str:
    with redirect_stdout(io.StringIO()) as stream:
        PartialState().print("partial", end="; ")
        Accelerator().print("accelerator", sep="")
    return stream.getvalue()


def split() -> list[Any]:
    with (
        PartialState().split_between_processes(list("abcd")) as mine,
        Accelerator().split_between_processes({"x": torch.arange(1)}, apply_padding=True) as padded,
    ):
        return [mine, padded["x"].tolist()]


def another_backend_is_refused() -> str:
    PartialState._reset_state()
    AcceleratorState._reset_state()
    try:
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="ucc")])
    except ConfigurationError as error:
        return str(error)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    return "was accepted"


def all_checks(folder: str) -> dict[str, Any]:
    return {
        "ranks": ranks(),
        "decorators": decorators(),
        "call_time": decorator_asks_at_call_time(),
        "first": first_comes_first(folder),
        "failing": first_fails_and_the_others_go_on(),
        "printed": printed(),
        "split": split(),
        "backend": another_backend_is_refused(),
    }


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_group(all_checks, request.param, str(tmp_path_factory.mktemp("state")))


def test_ranks_form_a_gloo_group_without_being_asked(found: list[dict[str, Any]]) -> None:
    size = len(found)
    for rank, result in enumerate(found):
        assert result["ranks"]["rank"] == (rank, rank, size)
        assert result["ranks"]["flags"] == (rank == 0, rank == 0, rank == size - 1)


def test_decorators(found: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(found):
        expected = [rank == 0, rank == 0, rank == 0, rank == len(found) - 1, rank == 1, rank == 1, rank == 0]
        for returned in result["decorators"].values():
            assert [value == "ran" for value in returned] == expected
            assert set(returned) <= {"ran", None}
        assert result["call_time"]


def test_one_goes_first_and_a_failure_there_does_not_hold_the_others(found: list[dict[str, Any]]) -> None:
    assert found[0]["first"] == [False, False]
    assert all(result["first"] == [True, True] for result in found[1:])
    assert [result["failing"] for result in found] == ["the first one failed", *["went on"] * (len(found) - 1)]


def test_print_speaks_once(found: list[dict[str, Any]]) -> None:
    assert [result["printed"] for result in found] == ["partial; accelerator\n", *[""] * (len(found) - 1)]


def test_shares(found: list[dict[str, Any]]) -> None:
    assert [letter for result in found for letter in result["split"][0]] == list("abcd")
    assert all(result["split"][1] == [0] for result in found)


def test_another_backend_than_the_group_has_is_refused(found: list[dict[str, Any]]) -> None:
    assert all("'ucc' was asked for" in result["backend"] and "'gloo'" in result["backend"] for result in found)


def group_of_the_program() -> dict[str, Any]:
    # The program numbers its ranks the other way round than the launcher did.
    rank = 1 - int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    before = dist.group.WORLD
    accelerator = Accelerator()
    same = dist.group.WORLD is before
    total = accelerator.reduce(torch.tensor([float(accelerator.process_index)]), "sum").item()
    return {"rank": accelerator.process_index == rank, "same": same, "total": total}


def test_a_group_that_the_program_made_is_kept() -> None:
    assert run_group(group_of_the_program, 2) == [{"rank": True, "same": True, "total": 1.0}] * 2


def restart() -> list[Any]:
    """Two runs with different settings in one process each, with a collective in both."""
    found: list[Any] = []
    for precision, steps in (("no", 1), ("bf16", 3), ("no", 2)):
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
        total = int(accelerator.reduce(torch.tensor([accelerator.process_index + 1]), "sum").item())
        found.append((accelerator.mixed_precision, accelerator.gradient_accumulation_steps, total))
        if accelerator.is_main_process:
            time.sleep(0.3)  # the other is early: it must not meet at what this one is about to leave
        accelerator.reset()
        assert not dist.is_initialized()
        assert PartialState._shared_state == {}
    return found


RESTARTED = [("no", 1, 3), ("bf16", 3, 3), ("no", 2, 3)]


def test_reset_lets_another_run_start() -> None:
    assert run_group(restart, 2) == [RESTARTED] * 2


def models_that_outlive_their_group() -> None:
    for _ in range(60):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.reduce(torch.ones(1))
        accelerator.end_training()
        del model, accelerator
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_that_goes_after_its_group_does_not_hang() -> None:
    """The model was the last to hold the group, whose threads may still have had tensors to free."""
    assert run_group(models_that_outlive_their_group, 2) == [None, None]


def test_under_torchrun(tmp_path: Path) -> None:
    """torchrun keeps one store for all runs of its workers, so a second group must not read the first one's keys."""
    source = f"""
import json, os, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from accelerate import Accelerator
from tests.multiprocess import test_state
first = Accelerator()
facts = [first.process_index, first.num_processes, first.state.backend, str(first.device)]
first.reset()
found = test_state.restart()
open(os.path.join({str(tmp_path)!r}, os.environ["RANK"]), "w").write(json.dumps([facts, found]))
"""
    done = run_script(source, 2)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        facts, restarted = json.loads((tmp_path / str(rank)).read_text())
        assert facts == [rank, 2, "gloo", "cpu"]
        assert [tuple(entry) for entry in restarted] == RESTARTED
