"""A signal to one process stops all of them at one step, with one checkpoint and one exit code."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import psutil
import pytest
import torch
from tests.support.processes import run_group
from tests.support.stopping import Run, checkpoints, notes, rows_that_count, until

from accelerate.devices.machine import get_free_port

pytestmark = pytest.mark.multiprocess

EVERY_ROW = [float(row) for row in range(24)]


def stop_at_random(seed: int, rounds: int) -> list[tuple[int, bool]]:
    """In each round one rank, or two, signal themselves at some step; return where this rank stopped."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, ends = accelerator.process_index, []
    for turn in range(rounds):
        dice = random.Random(seed * 100 + turn)  # the same on all ranks
        targets = [dice.randrange(accelerator.num_processes) for _ in range(dice.choice((1, 2)))]
        at = accelerator.progress.step + dice.randrange(1, 5)
        reads = dice.choice((1, 3)) if rank == targets[0] else 1
        answers = {accelerator.should_stop}  # listens from here on
        while True not in answers:
            accelerator.backward(model(torch.ones(2, 1)).mean())
            optimizer.step()
            if rank in targets and accelerator.progress.step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            answers = {accelerator.should_stop for _ in range(reads)}
        ends.append((accelerator.progress.step, len(answers) == 1))
        accelerator.wait_for_everyone()
        accelerator._run_progress.stop_listening()
        accelerator._run_progress.preemption = None  # the next round agrees anew
    return ends


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_stop_at_the_same_step_however_the_signal_comes(world_size: int) -> None:
    first, *others = run_group(stop_at_random, world_size, world_size, 6)
    assert others == [first] * (world_size - 1)
    # One answer a step, however often it is read; and every round ended with a step of its own.
    assert all(same for _, same in first)
    assert len({step for step, _ in first}) == 6


def train_on_uneven_inputs() -> tuple[int, int, int]:
    """Rank 0 has three batches, rank 1 two; then rank 1 gets a signal."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 1)).mean())
        optimizer.step()

    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(3 - accelerator.process_index):
            step()
    after = accelerator.progress.step
    assert not accelerator.should_stop
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    made = 0
    while not accelerator.should_stop:
        step()
        made += 1
    accelerator.wait_for_everyone()
    return after, made, accelerator.progress.step


def test_a_rank_that_ran_out_of_batches_counts_the_updates_of_the_run() -> None:
    first, second = run_group(train_on_uneven_inputs, 2)
    assert first == second
    assert first[0] == 3


def evaluate_until_told() -> tuple[int, bool]:
    """Rank 1 is told to stop inside an evaluation in which no optimizer steps."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(10):
        if number == 4 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if accelerator.check_stop():
            break
    accelerator.end_training()
    return number, accelerator.should_stop  # the answer outlives the group


def test_an_evaluation_can_ask_by_a_collective() -> None:
    assert run_group(evaluate_until_told, 2) == [(4, True), (4, True)]


def test_sigterm_to_one_rank_while_the_other_is_in_evaluation(tmp_path: Path) -> None:
    # Steps that take their time: the ranks must have agreed before the last one, on a busy machine too.
    run = Run(tmp_path, "--num_processes", "2", words=["evaluate=0@5", "pause=0.5"])
    run.await_file("evaluating", "pid-1")
    os.kill(run.pid_of(1), signal.SIGTERM)
    (tmp_path / "go").touch()
    code, errors = run.wait()
    assert code == 75, errors
    assert "stop at step" in errors
    assert "Traceback" not in errors
    saved = [entry for (entry,) in notes(tmp_path, "saved")]
    assert saved[0] == saved[1]
    assert 6 <= saved[0]["step"] < 18
    assert [[entry["code"] for entry in leaving] for leaving in notes(tmp_path, "exit")] == [[75], [75]]
    assert checkpoints(tmp_path) == [Path(saved[0]["path"]).name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_launcher_that_is_told_to_stop_lets_its_workers_save(tmp_path: Path, number: signal.Signals) -> None:
    # A restart that was left must not start what was stopped anew.
    words = ["pause=0.5", "workers=1"]  # the workers of the loader must not be hit
    run = Run(tmp_path, "--num_processes", "2", "--max_restarts", "2", words=words)
    run.await_file("running-0", "running-1")
    run.process.send_signal(number)
    code, errors = run.wait()
    assert code == 75, errors
    assert ("SIGTERM, the workers have 30 s to save and end" in errors) == (number is signal.SIGTERM)
    (first,), (second,) = notes(tmp_path, "saved")
    assert first == second
    assert len(checkpoints(tmp_path)) == 1

    again = Run(tmp_path, "--num_processes", "2", "--auto_resume")
    code, errors = again.wait()
    assert code == 0, errors
    assert rows_that_count(tmp_path) == dict.fromkeys(range(3), EVERY_ROW)
    batches = notes(tmp_path, "batch")
    for entries in batches:
        assert [entry["step"] for entry in entries] == list(range(1, 19))  # no step twice, none left out
        assert [entry["seen"] for entry in entries] == [4 * step for step in range(1, 19)]


def test_a_signal_to_every_process_lets_the_workers_save(tmp_path: Path) -> None:
    run = Run(tmp_path, "--num_processes", "2", words=["pause=0.5", "workers=2"])
    run.await_file("running-0", "running-1")
    launcher = psutil.Process(run.process.pid)
    everyone = [*launcher.children(recursive=True), launcher]
    assert len(everyone) >= 1 + 2 + 4
    # The loaders' workers come first: a process that saves must not find them gone.
    for process in sorted(everyone, key=lambda process: process.create_time(), reverse=True):
        process.send_signal(signal.SIGTERM)
    code, errors = run.wait()
    assert code == 75, errors
    assert "Traceback" not in errors
    (first,), (second,) = notes(tmp_path, "saved")
    assert first == second
    assert len(checkpoints(tmp_path)) == 1
    assert [process for process in everyone if process.is_running()] == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_notice_before_the_first_read_stops_the_run_at_its_first_step(tmp_path: Path, count: int) -> None:
    run = Run(tmp_path, "--num_processes", str(count), words=["early=1", "pause=0.5"])
    names = [f"early-{rank}" for rank in range(count)]
    until(lambda: all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in names))
    os.kill(int((tmp_path / names[-1]).read_text()), signal.SIGUSR1)
    (tmp_path / "go").touch()
    code, errors = run.wait()
    assert code == 75, errors
    assert len(checkpoints(tmp_path)) == 1


def test_a_signal_to_one_machine_stops_the_other_too(tmp_path: Path) -> None:
    port = str(get_free_port())
    common = [
        "--num_processes",
        "2",
        "--num_machines",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        port,
    ]
    runs = [Run(tmp_path, *common, "--machine_rank", str(rank), words=["pause=0.5"]) for rank in (0, 1)]
    runs[0].await_file("running-0", "running-1")
    runs[1].process.send_signal(signal.SIGTERM)
    ends = [run.wait() for run in runs]
    assert [code for code, _ in ends] == [75, 75], ends
    (first,), (second,) = notes(tmp_path, "saved")
    assert first == second
    assert len(checkpoints(tmp_path)) == 1


def test_a_worker_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, "--num_processes", "2", "--preemption_grace", "1", words=["evaluate=0@1"])
    run.await_file("evaluating", "pid-1", "log-1")
    workers = [psutil.Process(run.pid_of(rank)) for rank in (0, 1)]
    until(lambda: bool(notes(tmp_path, "batch")[1]))
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.wait()
    assert code == 143, errors
    assert "the workers have 1 s to save and end" in errors
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    assert checkpoints(tmp_path) == []
