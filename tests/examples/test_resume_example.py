"""The example that resumes: killed, and started again on another number of processes, it ends with the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.examples.test_examples import EXAMPLES, numbers, run_example
from tests.support.processes import script_environment

SUMMARY = r"step (\d+), (\d+) samples, loss ([\d.]+), mean loss ([\d.]+), accuracy ([\d.]+)"
EPOCHS = 4
STEPS = 30 * EPOCHS


def kill_after(step: int, log: Path, *arguments: str) -> None:
    """Start the example on one process and kill it once it has logged a step."""
    command = [sys.executable, str(EXAMPLES / "resume.py"), "--losses", str(log), *arguments]
    with subprocess.Popen(command, env=script_environment(), stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 600
        while not log.exists() or log.read_text().count("\n") < step:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.kill()
    assert process.returncode == -9


def test_a_killed_run_goes_on_on_two_processes(tmp_path: Path) -> None:
    arguments = ["--epochs", str(EPOCHS), "--save-every", "5"]
    whole = numbers(SUMMARY, run_example("resume", 1, "--project", str(tmp_path / "whole"), *arguments))
    assert whole[:2] == [STEPS, 1437 * EPOCHS]
    assert whole[4] > 0.8

    log, project = tmp_path / "losses", ["--project", str(tmp_path / "killed")]
    kill_after(STEPS // 3, log, *project, *arguments)
    before = log.read_text().count("\n")
    output = run_example("resume", 2, "--losses", str(log), *project, *arguments)
    assert "on 2 process(es)" in output
    assert numbers(SUMMARY, output) == pytest.approx(whole, abs=2e-5)
    lines = log.read_text().splitlines()
    first_step, _, processes = json.loads(lines[before])
    assert processes == 2
    # It went on from a checkpoint, and has made again no more than what lay between two, and one in the making.
    assert before - 10 <= first_step - 1 <= before
    assert len(list((tmp_path / "killed" / "checkpoints").iterdir())) == 2

    # Started once more, it has nothing left to do.
    assert numbers(SUMMARY, run_example("resume", 1, *project, *arguments)) == pytest.approx(whole, abs=2e-5)
