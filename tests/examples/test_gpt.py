"""The GPT example trains the same in every layout that its configuration files name."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.launching import launch_warm
from tests.support.processes import ROOT, script_environment

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "gpt"
CONFIGS = sorted(path.stem for path in (EXAMPLE / "configs").glob("*.yaml"))
OPTIONS = ("--steps", "3", "--width", "32", "--blocks", "2")


def losses(*command: str | Path) -> list[float]:
    """Run the example and return the losses that it prints."""
    finished = subprocess.run(
        [sys.executable, *map(str, command), str(EXAMPLE / "train.py"), *OPTIONS],
        env=script_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-6000:]
    return losses_in(finished.stdout)


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]


@cache
def of_one_process() -> list[float]:
    return losses()


def test_one_process_learns() -> None:
    first, last = of_one_process()
    assert last < first - 0.1


def test_there_is_a_file_for_each_layout() -> None:
    engines = {"deepspeed_zero2", "deepspeed_zero3", "megatron"}
    assert set(CONFIGS) == {"ddp", "fsdp2", "hsdp", "tp", "fsdp2_tp", "fsdp2_cp", "pipeline"} | engines


# These go through the launcher as a program; the others are planned by it and start at once.
STARTED = {"ddp", "pipeline"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layout_trains_as_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # a file that names another one does so from here
    package = {"deepspeed_zero2": "deepspeed", "deepspeed_zero3": "deepspeed", "megatron": "megatron"}.get(name)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    options = ["--config_file", EXAMPLE / "configs" / f"{name}.yaml"]
    if name in STARTED:
        launched = losses("-m", "accelerate.commands.accelerate_cli", "launch", *options)
    else:
        launched = losses_in(launch_warm(options, EXAMPLE / "train.py", OPTIONS))
    assert launched == pytest.approx(of_one_process(), abs=2e-5)
