"""A process that stands still for a while: the others wait for it, and the run ends as if nothing had happened."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.support.stopping import Run, notes, rows_that_count

pytestmark = pytest.mark.multiprocess

SECONDS = 1.0  # far less than the timeout of a process group


def last_steps(folder: Path) -> list[int]:
    return [entries[-1]["step"] for entries in notes(folder, "batch")]


def test_the_others_wait_for_a_process_that_stands_still(tmp_path: Path) -> None:
    run = Run(tmp_path, "--num_processes", "2", words=["pause=0.2", "save=6", "workers=1"])
    run.await_file("running-0", "running-1")
    sleeper = psutil.Process(run.pid_of(1))
    sleeper.send_signal(signal.SIGSTOP)
    try:
        time.sleep(SECONDS)
        assert sleeper.status() == psutil.STATUS_STOPPED
        ahead, behind = last_steps(tmp_path)
        assert run.process.poll() is None
    finally:
        sleeper.send_signal(signal.SIGCONT)
    # A step needs both: nobody is further than the step that the other one has begun.
    assert abs(ahead - behind) <= 1
    assert max(ahead, behind) < 18
    code, errors = run.wait()
    assert code == 0, errors
    assert "Traceback" not in errors
    (first,), (second,) = notes(tmp_path, "end")
    assert (first["weights"], first["step"]) == (second["weights"], 18)
    assert rows_that_count(tmp_path) == {epoch: [float(row) for row in range(24)] for epoch in range(3)}
