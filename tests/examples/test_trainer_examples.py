"""The examples with Transformers' Trainer learn, by python and by `accelerate launch --config_file`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.launching import launch, launch_environment
from tests.support.processes import ROOT

pytestmark = [pytest.mark.clients, pytest.mark.multiprocess]

EXAMPLES = ROOT / "examples"
FILE = EXAMPLES / "two_processes.yaml"
LINE = re.compile(r"accuracy ([\d.]+) on (\d+) \w+ after (\d+) steps on (\d) processes")


def run(name: str, world_size: int, *arguments: str) -> tuple[float, int, int, int]:
    """Run an example as a user does it; return accuracy, samples, steps and processes of its last line."""
    script = str(EXAMPLES / f"{name}.py")
    if world_size == 1:
        command = [sys.executable, script, *arguments]
        environment = launch_environment({"HF_HUB_OFFLINE": "1"})
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    else:
        done = launch("--config_file", str(FILE), script, *arguments, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-6000:]
    found = LINE.findall(done.stdout)
    assert len(found) == 1, done.stdout
    ((accuracy, samples, steps, processes),) = found
    return float(accuracy), int(samples), int(steps), int(processes)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_cnn_of_ones_own_learns_under_trainer(world_size: int) -> None:
    accuracy, images, steps, processes = run("trainer_digits_cnn", world_size, "--epochs", "4")
    assert (images, processes) == (360, world_size)
    # 1437 images in batches of 16 on each process.
    assert steps == 4 * {1: 90, 2: 45}[world_size]
    assert accuracy > 0.93


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_classifier_of_texts_is_tuned_and_saved(world_size: int, tmp_path: Path) -> None:
    accuracy, passages, steps, processes = run("trainer_finetune", world_size, "--output", str(tmp_path))
    assert (passages, processes) == (90, world_size)
    assert steps == 8 * {1: 45, 2: 23}[world_size]
    assert accuracy > 0.8
    assert {path.name for path in (tmp_path / "tuned").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
