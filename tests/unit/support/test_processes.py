"""The harness itself: results in order, failures with their reason, leaks reported by name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.support.processes import (
    ROOT,
    ProcessGroupFailure,
    run_group,
    run_script,
    run_warm_script,
    script_environment,
)

pytestmark = pytest.mark.multiprocess


def ranks(extra: str) -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "EXTRA")
    return (extra, *(os.environ[name] for name in names))


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_results_come_in_rank_order(start_method: str) -> None:
    found = run_group(ranks, 2, "given", env={"EXTRA": "e"}, start_method=start_method)
    assert found == [("given", "0", "0", "2", "2", "1", "e"), ("given", "1", "1", "2", "2", "1", "e")]


def test_tensors_come_back_by_value() -> None:
    assert run_group(lambda: torch.full((3,), float(os.environ["RANK"])), 2)[1].tolist() == [1.0, 1.0, 1.0]


def test_a_process_that_dies_is_named() -> None:
    def die_on_one() -> None:
        if os.environ["RANK"] == "1":
            os._exit(7)

    with pytest.raises(ProcessGroupFailure, match="rank 1 failed:\nthe process ended without a result, exit code 7"):
        run_group(die_on_one, 2)


def test_a_process_that_hangs_is_shown_with_its_stack() -> None:
    def sleep_on_zero() -> None:
        if os.environ["RANK"] == "0":
            time.sleep(60)

    with pytest.raises(ProcessGroupFailure, match=r"rank 0 did not end; it stands at:\n(.*\n)*.*in sleep_on_zero"):
        run_group(sleep_on_zero, 2, timeout=2)


def test_a_script_runs_under_torchrun() -> None:
    source = "import os, sys\nsys.stdout.write(f\"rank {os.environ['RANK']} {sys.argv[1]} {os.environ['X']}\\n\")\n"
    result = run_script(source, 2, ["argument"], env={"X": "y"})
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")) == ["", "rank 0 argument y", "rank 1 argument y"]


SCRIPT = """
import atexit, os, sys, warnings
atexit.register(print, "end of", os.environ.get("RANK"))
assert __name__ == "__main__"
warnings.warn("no error here", DeprecationWarning)
print(sys.argv[1:], sys.path[0] == os.path.dirname(__file__), os.environ.get("X"), os.environ.get("WORLD_SIZE"))
print("aside", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_a_warm_script_sees_what_it_sees_under_torchrun(script: Path) -> None:
    output = run_warm_script(script, 2, ["0", "word"], env={"X": "y"})
    assert output == "".join(f"['0', 'word'] True y 2\nend of {rank}\n" for rank in range(2))
    assert sys.argv[0] != str(script)


def test_a_warm_script_alone_sees_what_it_sees_under_python(script: Path) -> None:
    assert run_warm_script(script, 1, ["0"]) == "['0'] True None None\nend of None\n"


def test_a_warm_script_that_fails_is_shown_with_its_stderr(script: Path) -> None:
    with pytest.raises(ProcessGroupFailure, match=r"script.py ended with 3\n(.*\n)*aside"):
        run_warm_script(script, 2, ["3"])
    with pytest.raises(ProcessGroupFailure, match="ValueError: invalid literal"):
        run_warm_script(script, 1, ["word"])


LEAKING = """
import os
import torch.distributed as dist

def test_variable():
    os.environ["LEFT_HERE"] = "1"

def test_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def test_clean():
    assert "LEFT_HERE" not in os.environ
    assert not dist.is_initialized()
"""


def test_a_leak_fails_the_test_that_made_it(tmp_path: Path) -> None:
    Path(tmp_path, "test_leaks.py").write_text(LEAKING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=script_environment(), capture_output=True, text=True, check=False)
    assert "3 passed, 2 errors" in result.stdout, result.stdout
    assert "environment variable LEFT_HERE: None -> '1'" in result.stdout
    assert "a torch.distributed process group" in result.stdout
