"""Hundreds of signals at the launcher and at its workers while they save: one stop, one checkpoint, one exit code."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
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


class Storm:
    """Send signals to processes until they are gone."""

    def __init__(self, processes: Sequence[int], numbers: Sequence[signal.Signals], seed: int) -> None:
        self.sent: list[signal.Signals] = []
        self._calm = threading.Event()
        self._thread = threading.Thread(target=self._rage, args=(processes, numbers, random.Random(seed)))
        self._thread.start()

    def _rage(self, processes: Sequence[int], numbers: Sequence[signal.Signals], dice: random.Random) -> None:
        while not self._calm.wait(0.002):
            number = dice.choice(numbers)
            with suppress(ProcessLookupError):
                os.kill(dice.choice(processes), number)
                self.sent.append(number)

    def end(self) -> None:
        self._calm.set()
        self._thread.join()


def storm_over(run: Run, processes: Sequence[int], numbers: Sequence[signal.Signals], seed: int) -> tuple[int, str]:
    """Let it rage until the run has ended."""
    storm = Storm(processes, numbers, seed)
    try:
        return run.wait()
    finally:
        storm.end()


def test_schedulers_that_repeat_themselves_get_one_checkpoint_and_one_exit_code(tmp_path: Path) -> None:
    run = Run(tmp_path, "--num_processes", "2", "--max_restarts", "2", words=WORDS)
    run.await_file("running-0", "running-1")
    everybody = [run.process.pid, run.pid_of(0), run.pid_of(1)]
    code, errors = storm_over(run, everybody, [*REQUESTS, *NOISE], seed=0)
    assert code == 75, errors
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


def test_somebody_who_leans_on_the_keyboard_ends_the_run_and_breaks_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "--num_processes", "2", words=WORDS)
    run.await_file("running-0", "running-1")
    numbers = [*REQUESTS, *NOISE, signal.SIGINT, signal.SIGINT]
    workers = [psutil.Process(run.pid_of(rank)) for rank in (0, 1)]
    code, errors = storm_over(run, [run.process.pid], numbers, seed=1)
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
