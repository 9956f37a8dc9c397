"""`accelerate test` as a program: all is well, and what it says when a collective is broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.launching import launch_environment
from tests.support.processes import without_gloo_notes

from accelerate.test_utils.scripts.test_script import CHECKS

pytestmark = pytest.mark.multiprocess

# Loaded by the python of every worker before anything else.
WRONG_SUM = """
import os
if "RANK" in os.environ:
    import torch.distributed as dist
    real = dist.all_reduce
    def broken(tensor, *args, **kwargs):
        result = real(tensor, *args, **kwargs)
        tensor.add_(1)
        return result
    dist.all_reduce = broken
"""
ERROR_ON_ONE_RANK = """
import os
if os.environ.get("RANK") == "1":
    import torch.distributed as dist
    def broken(*args, **kwargs):
        raise RuntimeError("the cable is out")
    dist.all_reduce = broken
"""
LOADERS_FORGET = """
import os
if "RANK" in os.environ:
    from accelerate.checkpointing.run_parts import LoaderPart
    LoaderPart.restore = lambda self, payload: None
"""


def self_check(*words: str, customised: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = launch_environment()
    if customised is not None:
        environment["PYTHONPATH"] = f"{customised}:{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    done.stdout = without_gloo_notes(done.stdout)
    return done


def verdicts(output: str) -> dict[str, str]:
    """Return the word after each title."""
    titles = [check.title for check in CHECKS]
    found = {}
    for line in output.splitlines():
        title = next((title for title in titles if line.strip().startswith(title)), None)
        if title is not None:
            found[title] = line.strip().removeprefix(title).strip().split("  ")[0]
    return found


@pytest.mark.parametrize("words", [("--cpu",), ("--cpu", "--num-processes", "2")])
def test_every_check_passes(words: tuple[str, ...]) -> None:
    done = self_check(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verdicts(done.stdout) == {check.title: "ok" for check in CHECKS}
    assert f"All {len(CHECKS)} checks passed" in done.stdout
    assert done.stdout.startswith("2 processes" if len(words) > 1 else "1 process ")


def test_the_file_says_how_many_processes(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmixed_precision: bf16\n")
    done = self_check("--config_file", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 processes on cpu (MULTI_CPU)")


def test_a_wrong_sum_is_named_and_the_rest_is_checked(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_SUM)
    done = self_check("--cpu", "--num_processes", "2", customised=tmp_path)
    assert done.returncode == 1
    found = verdicts(done.stdout)
    assert len(found) == len(CHECKS)
    assert found["reduce of nested data"] == "FAILED"
    assert (found["gather of nested data"], found["loader: shuffled"]) == ("ok", "ok")
    assert "rank 1: CheckFailure: reduce by sum gave tensor([2., 2.]) where tensor([1., 1.]) is right" in done.stdout


def test_an_error_on_one_rank_ends_the_check_although_the_other_waits(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ERROR_ON_ONE_RANK)
    done = self_check("--cpu", "--num_processes", "2", customised=tmp_path)
    assert done.returncode == 1
    found = verdicts(done.stdout)
    assert (found["reduce of nested data"], found["padding to equal length"]) == ("FAILED", "not run")
    assert "rank 1: RuntimeError: the cable is out" in done.stdout


def test_a_checkpoint_that_forgets_the_loader_is_found(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOADERS_FORGET)
    done = self_check("--cpu", "--num_processes", "2", customised=tmp_path)
    assert done.returncode == 1
    found = verdicts(done.stdout)
    assert {title for title, verdict in found.items() if verdict != "ok"} == {"checkpoint round trip"}
    assert "position of the loader after loading" in done.stdout


def test_wrong_options_are_named() -> None:
    misspelt = self_check("--num_process", "2")
    assert (misspelt.returncode, "did you mean --num_processes?" in misspelt.stderr) == (2, True)
    script = self_check("train.py")
    assert (script.returncode, "'train.py' is no option" in script.stderr) == (2, True)
