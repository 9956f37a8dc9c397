"""`accelerate config default` and `config update` write what `launch` reads."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from accelerate._base.errors import ConfigurationError
from accelerate.commands import accelerate_cli
from accelerate.commands import config as command
from accelerate.commands.config import default_config_file, get_config_parser, load_config_from_file
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import patch_environment


def run(*words: str) -> None:
    args = get_config_parser().parse_args(list(words))
    args.func(args)


@pytest.mark.parametrize("flag", ["--config_file", "--config-file"])
def test_default_writes_a_file_for_this_machine(tmp_path: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    run("default", flag, str(path), "--mixed_precision", "bf16")
    assert str(path) in capsys.readouterr().out
    assert json.loads(path.read_text())["mixed_precision"] == "bf16"
    assert isinstance(load_config_from_file(path), ClusterConfig)
    run("default", flag, str(path))
    assert "left as it is" in capsys.readouterr().out


@pytest.mark.parametrize("path", ["/proc/none/config.yaml", f"{'a' * 300}.yaml", "~nobody_of_that_name/config.yaml"])
def test_a_place_that_cannot_be_written_is_one_line(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cli.run(["config", "default", "--config_file", path]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"accelerate config: error: The configuration file {path!r} cannot be written: ")
    assert said.count("\n") == 1


def test_a_default_place_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config", "default"]
    with patch_environment(hf_home="/proc/none"):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "'/proc/none/accelerate/default_config.yaml' cannot be written" in done.stderr


@pytest.mark.parametrize("words", [("config", "default"), ("config",)])
def test_a_folder_is_no_file(tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cli.run([*words, "--config_file", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert f"{str(tmp_path)!r} is a folder" in said.err
    assert said.out == ""


def test_update_brings_old_keys_to_those_of_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: TPU\nfp16: true\nnum_processes: 8\nmain_process_ip: null\n")
    run("update", "--config_file", str(path))
    written = yaml.safe_load(path.read_text())
    assert (written["distributed_type"], written["mixed_precision"]) == ("XLA", "fp16")
    assert "main_process_ip" not in written
    assert "fp16" not in written
    assert str(path) in capsys.readouterr().out


def test_update_keeps_a_json_file_as_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"distributed_type": "NO", "fp16": true, "num_processes": 1}')
    run("update", "--config_file", str(path))
    assert json.loads(path.read_text())["mixed_precision"] == "fp16"


def test_the_parser_fits_under_another_one() -> None:
    above = argparse.ArgumentParser()
    get_config_parser(above.add_subparsers())
    assert above.parse_args(["config", "default"]).mixed_precision == "no"


def test_show_says_where_each_value_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("config.yaml")
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\n")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    run("show", "--config_file", str(path))
    rows = {words[1]: words for line in capsys.readouterr().out.splitlines() if len(words := line.split()) > 4}
    assert rows["num_processes"][3] == "3"
    assert rows["num_processes"][5:7] == ["file", f"{path}:"]
    assert rows["mixed_precision"][3:7] == ["bf16", "│", "environment", "ACCELERATE_MIXED_PRECISION"]
    assert "rdzv_backend" not in rows
    run("show", "--config_file", str(path), "--verbose")
    assert "rdzv_backend" in capsys.readouterr().out


def test_show_names_what_a_file_has_of_another_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: NO\nuse_xpu: true\nnum_processes: 1\n")
    run("show", "--config_file", str(path))
    told = capsys.readouterr().out
    assert f"note: {path}: " in told
    assert "the accelerator of Intel is found by itself" in told


def test_show_prints_what_this_machine_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nnum_machines: 2\nmain_process_ip: 10.0.0.1\n")
    with pytest.raises(ConfigurationError, match="cannot be shared evenly"):
        run("show", "--config_file", str(path))
    assert "num_machines" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["default", "show", "update"])
def test_help_of_a_sub_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(name, "--help")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"config {name} [-h]" in told
    assert "--config_file" in told


def test_names_are_found_and_others_are_not() -> None:
    assert default_config_file.endswith("accelerate/default_config.yaml")
    assert "load_config_from_file" in dir(command)
    assert not hasattr(command, "nothing")
