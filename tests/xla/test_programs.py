"""Whole programs: a checkpoint goes from device to device, two processes train as DDP does, an example learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.xla import largest_difference

if os.environ.get("XLA_USE_SPMD") == "1":
    pytest.skip("the programs choose by themselves", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).with_name("resume_script.py"))


def run(command: list[str], start: str = "{", **variables: str) -> str:
    """Run a program and return the line of its output that begins with some text."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CPU_NUM_DEVICES": "2", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return next(line for line in done.stdout.splitlines() if line.startswith(start))


def train(mode: str, action: str, folder: Path) -> dict[str, Any]:
    return json.loads(run([sys.executable, SCRIPT, mode, action, str(folder)]))


def test_a_checkpoint_goes_from_device_to_device(tmp_path: Path) -> None:
    first = train("xla", "save", tmp_path / "xla")
    assert len(first["losses"]) == 24 - 7
    assert train("xla", "load", tmp_path / "xla") == first
    for mode, strategy in (("cpu", "single"), ("spmd", "xla-spmd")):
        found = train(mode, "load", tmp_path / "xla")
        assert found["strategy"] == strategy
        assert largest_difference(found["losses"], first["losses"]) < 2e-6
    second = train("spmd", "save", tmp_path / "spmd")
    assert largest_difference(second["losses"], first["losses"]) < 2e-6
    for mode in ("cpu", "xla"):
        assert largest_difference(train(mode, "load", tmp_path / "spmd")["losses"], second["losses"]) < 2e-6
    third = train("cpu", "save", tmp_path / "cpu")
    for mode in ("xla", "spmd"):
        assert largest_difference(train(mode, "load", tmp_path / "cpu")["losses"], third["losses"]) < 2e-6


def test_two_processes_train_as_ddp_does(tmp_path: Path) -> None:
    """Each with an XLA device of its own, which do not reach each other: gradients travel over the host's group."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", SCRIPT]
    on_devices = json.loads(run([*launch, "xla", "save", str(tmp_path / "xla")]))
    assert (on_devices["strategy"], on_devices["processes"]) == ("xla", 2)
    on_cpus = json.loads(run([*launch, "cpu", "load", str(tmp_path / "xla")]))
    assert on_cpus["strategy"] == "ddp"
    assert largest_difference(on_devices["losses"], on_cpus["losses"]) < 2e-6


def test_the_digits_example_learns_as_on_the_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "digits_cnn.py"), "--epochs", "8", "--output", str(tmp_path)]

    def accuracy(**variables: str) -> float:
        return float(run(command, "accuracy", **variables).split()[1])

    on_cpu = accuracy(ACCELERATE_USE_CPU="1", USE_TORCH_XLA="0")
    assert on_cpu > 0.96
    assert accuracy() > on_cpu - 0.015
