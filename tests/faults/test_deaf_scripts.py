"""Signals to a run whose script does not read `should_stop`: it ends, by a code that tells the signal."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.support.launching import launch_command, launch_environment
from tests.support.stopping import until

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import os, sys, time
from pathlib import Path
name = f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
Path(sys.argv[1], f"{name}.part").write_text(str(os.getpid()))
Path(sys.argv[1], f"{name}.part").rename(Path(sys.argv[1], name))
time.sleep(600)
"""


class DeafRun:
    """One launch of two processes that know of no signal."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        (folder / "deaf.py").write_text(SCRIPT)
        self.process = subprocess.Popen(
            launch_command("--cpu", "--num_processes", "2", *options, str(folder / "deaf.py"), str(folder)),
            env=launch_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def workers(self, attempt: int = 0) -> list[psutil.Process]:
        """Wait until both run, and return them."""
        names = [self.folder / f"{rank}-{attempt}" for rank in (0, 1)]
        until(lambda: all(name.exists() for name in names) or self.process.poll() is not None)
        return [psutil.Process(int(name.read_text())) for name in names]

    def wait(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=300)
        return self.process.returncode, errors


@contextmanager
def deaf_run(folder: Path, *options: str) -> Iterator[DeafRun]:
    run = DeafRun(folder, *options)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.communicate()


def assert_last_lines_name(errors: str, ranks: str, number: signal.Signals) -> None:
    """Make sure that the launcher's report names rank, host and signal."""
    host = re.escape(socket.gethostname())
    assert re.search(rf"^rank [{ranks}] of 2 failed on {host} .*: {number.name}", errors, re.MULTILINE), errors


@pytest.mark.parametrize(("number", "to"), [(signal.SIGUSR1, "launcher"), (signal.SIGTERM, "worker")])
def test_the_run_ends_by_the_signal(tmp_path: Path, number: signal.Signals, to: str) -> None:
    with deaf_run(tmp_path) as run:
        workers = run.workers()
        if to == "launcher":
            run.process.send_signal(number)
        else:
            workers[1].send_signal(number)
        code, errors = run.wait()
    assert code == 128 + number, errors
    # The launcher ends the other one by SIGTERM too, and cannot tell afterwards which of the two was first.
    assert_last_lines_name(errors, "01", number)
    assert psutil.wait_procs(workers, timeout=60)[1] == []


def test_each_signal_costs_one_of_the_restarts_and_the_last_failure_is_reported(tmp_path: Path) -> None:
    with deaf_run(tmp_path, "--max_restarts", "2") as run:
        first = run.workers()
        run.process.send_signal(signal.SIGUSR1)
        second = run.workers(attempt=1)
        second[0].send_signal(signal.SIGTERM)
        third = run.workers(attempt=2)
        third[1].kill()
        code, errors = run.wait()
    assert code == 128 + signal.SIGKILL, errors
    assert_last_lines_name(errors, "1", signal.SIGKILL)
    assert psutil.wait_procs([*first, *second, *third], timeout=60)[1] == []
