"""Hundreds of signals at the launcher and at its workers while they save: one stop, one checkpoint, one exit code."""

from __future__ import annotations

import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import pytest
from tests.support.stopping import Run, checkpoints, notes, rows_that_count

from accelerate.checkpointing.catalog import catalog, newest_valid

pytestmark = pytest.mark.multiprocess

WORDS = ["pause=0.05", "save=1", "workers=1"]
NOISE = (signal.SIGCHLD, signal.SIGWINCH, signal.SIGCONT)
EVERY_ROW = {epoch: [float(row) for row in range(24)] for epoch in range(3)}
REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
GUST = 600  # signals, without a pause between them: no process is through before they are sent


class Storm:
    """Send signals to processes until they are gone: some hundreds at once, then one after another."""

    def __init__(self, processes: Sequence[int], numbers: Sequence[signal.Signals], seed: int) -> None:
        self.sent: list[signal.Signals] = []
        self._calm = threading.Event()
        # Not bare numbers: one that was given to another process meanwhile must not be hit.
        targets = [psutil.Process(process) for process in processes]
        self._thread = threading.Thread(target=self._rage, args=(targets, numbers, random.Random(seed)))
        self._thread.start()

    def _rage(
        self, processes: Sequence[psutil.Process], numbers: Sequence[signal.Signals], dice: random.Random
    ) -> None:
        for turn in count():
            if self._calm.wait(0 if turn < GUST else 0.002):
                return
            number = dice.choice(numbers)
            with suppress(psutil.NoSuchProcess):
                dice.choice(processes).send_signal(number)
                self.sent.append(number)

    def end(self) -> None:
        self._calm.set()
        self._thread.join()


def storm_over(
    run: Run, processes: Sequence[int], numbers: Sequence[signal.Signals], seed: int
) -> tuple[int, str, Counter[signal.Signals]]:
    """Let it rage until the run has ended; return how often each signal was sent, after the exit code and the errors."""
    storm = Storm(processes, numbers, seed)
    try:
        code, errors = run.wait()
    finally:
        storm.end()
    return code, errors, Counter(storm.sent)


def test_schedulers_that_repeat_themselves_get_one_checkpoint_and_one_exit_code(tmp_path: Path) -> None:
    run = Run(tmp_path, "--num_processes", "2", "--max_restarts", "2", words=WORDS)
    run.await_file("running-0", "running-1")
    everybody = [run.process.pid, run.pid_of(0), run.pid_of(1)]
    code, errors, sent = storm_over(run, everybody, [*REQUESTS, *NOISE], seed=0)
    assert code == 75, errors
    assert sum(sent[number] for number in REQUESTS) >= 200, sent
    assert "Traceback" not in errors
    assert errors.count("stop at step") == 1, errors
    (first,), (second,) = notes(tmp_path, "saved")
    assert first == second
    assert [[entry["code"] for entry in leaving] for leaving in notes(tmp_path, "exit")] == [[75], [75]]
    assert Path(first["path"]).name in checkpoints(tmp_path)
    assert not list(tmp_path.rglob(".*")), "nothing half-done, nothing claimed"

    again = Run(tmp_path, "--num_processes", "2", "--auto_resume")
    code, errors = again.wait()
    assert code == 0, errors
    assert rows_that_count(tmp_path) == EVERY_ROW


def test_signals_that_ask_for_nothing_change_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "--num_processes", "2", "--max_restarts", "2", words=["pause=0.02", "save=6", "workers=1"])
    run.await_file("running-0", "running-1")
    code, errors, sent = storm_over(run, [run.process.pid, run.pid_of(0), run.pid_of(1)], NOISE, seed=2)
    assert code == 0, errors
    assert min(sent[number] for number in NOISE) >= 100, sent
    assert "accelerate launch" not in errors, errors
    assert "Traceback" not in errors
    assert [[entry["attempt"] for entry in ends] for ends in notes(tmp_path, "end")] == [[0], [0]]
    assert rows_that_count(tmp_path) == EVERY_ROW


def test_somebody_who_leans_on_the_keyboard_ends_the_run_and_breaks_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "--num_processes", "2", words=WORDS)
    run.await_file("running-0", "running-1")
    numbers = [*REQUESTS, *NOISE, signal.SIGINT, signal.SIGINT]
    workers = [psutil.Process(run.pid_of(rank)) for rank in (0, 1)]
    code, errors, sent = storm_over(run, [run.process.pid], numbers, seed=1)
    assert sent[signal.SIGINT] >= 2, sent
    # The launcher may be hit again when it has nothing to do any more but to end.
    assert code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM), errors
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    found = newest_valid(tmp_path / "run")
    assert found.value is not None
    assert [info.is_valid for info in catalog(tmp_path / "run")] == [True] * len(catalog(tmp_path / "run"))

    again = Run(tmp_path, "--num_processes", "2", "--auto_resume", words=["save=6"])
    code, errors = again.wait()
    assert code == 0, errors
    assert rows_that_count(tmp_path) == EVERY_ROW
    assert not list(tmp_path.rglob(".*")), "what was left is gone, and nothing is claimed"
