"""The worker as a program, on a machine whose torch_xla is a stand-in with two cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import script_environment

from accelerate.launch.plan import WORKER

TORCH_XLA = """
def launch(function, debug_single_process):
    for index in range(1 if debug_single_process else 2):
        function(index)
"""
SCRIPT = """
import sys

def fit():
    print(__name__, sys.argv, sys.path[0])
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch_xla.py").write_text(TORCH_XLA)
    (tmp_path / "train.py").write_text(SCRIPT)


def spawn(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = script_environment()
    environment["PYTHONPATH"] = f"{folder / 'packages'}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, str(WORKER), "xla", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.parametrize(("count", "cores"), [("0", 2), ("1", 1)])
@pytest.mark.parametrize(("kind", "name"), [("script", "train.py"), ("module", "train")])
def test_the_training_function_runs_on_every_core(tmp_path: Path, count: str, cores: int, kind: str, name: str) -> None:
    done = spawn(tmp_path, count, "fit", kind, name, "--lr", "1")
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"train {[name, '--lr', '1']} {tmp_path}"] * cores


def test_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = spawn(tmp_path, "0", "main", "script", "train.py")
    assert done.returncode == 1
    assert "train.py has no function 'main' to run on the TPU. Define it, or name another one with" in done.stderr
