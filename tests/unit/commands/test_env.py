"""`accelerate env`: what it tells, as text and as JSON, without loading torch."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.launching import launch_environment

from accelerate.commands import accelerate_cli
from accelerate.commands.env import env_command, env_command_parser


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "env", *words]
    return subprocess.run(
        command, env=launch_environment(env), capture_output=True, text=True, check=False, timeout=600
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nfsdp_config: {}\n")
    return path


def test_json_holds_versions_hardware_and_configuration(config: Path) -> None:
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_HUB_TOKEN": "abc"}
    done = run("--json", "--config-file", str(config), env=variables)
    facts = json.loads(done.stdout)
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert facts["accelerate"]["version"] == "2.0.0"
    assert facts["python"]["executable"] == sys.executable
    assert facts["hardware"]["cpu_cores"] >= 1
    assert facts["config"]["file"] == str(config)
    assert facts["config"]["content"]["num_processes"] == 3
    assert facts["variables"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert facts["variables"]["ACCELERATE_HUB_TOKEN"] == "***"


def test_what_decides_about_xla_devices_is_shown() -> None:
    variables = {"PJRT_DEVICE": "CPU", "XLA_USE_SPMD": "1", "CPU_NUM_DEVICES": "2", "TPU_VISIBLE_CHIPS": "0"}
    facts = json.loads(run("--json", env=variables).stdout)
    assert {name: facts["variables"].get(name) for name in variables} == variables


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    done = run(env={"PYTHONPATH": f"{tmp_path}:{launch_environment()['PYTHONPATH']}"})
    assert done.returncode == 0, done.stderr
    assert f"  torch: {importlib.metadata.version('torch')}\n" in done.stdout
    assert "  file: (none)\n" in done.stdout


def test_the_default_file_is_found_and_a_wrong_one_is_shown(tmp_path: Path) -> None:
    place = tmp_path / "accelerate" / "default_config.yaml"
    place.parent.mkdir()
    place.write_text("distributed_type: NO\nnum_processs: 1\n")
    done = run("--json", env={"HF_HOME": str(tmp_path)})
    facts = json.loads(done.stdout)["config"]
    assert facts["file"] == str(place)
    assert "num_processs" in facts["error"]


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cli.run(["env", "--config_file", "nowhere.yaml"]) == 2
    told = capsys.readouterr().err
    assert "nowhere.yaml" in told
    assert told.count("\n") == 1


def test_verbose_asks_torch(capsys: pytest.CaptureFixture[str]) -> None:
    facts = env_command(env_command_parser().parse_args(["--verbose"]))
    assert facts["torch"]["version"].startswith(importlib.metadata.version("torch").split("+")[0])
    assert facts["torch"]["device"] in capsys.readouterr().out
