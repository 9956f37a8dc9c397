"""`accelerate config default` and `config update` write what `launch` reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml

from accelerate._base.errors import UsageError
from accelerate.commands import config as command
from accelerate.commands.config import default_config_file, get_config_parser, load_config_from_file
from accelerate.commands.config.config_args import ClusterConfig


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


def test_update_brings_old_keys_to_those_of_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("distributed_type: TPU\nfp16: true\nnum_processes: 8\nmain_process_ip: null\n")
    run("update", "--config_file", str(path))
    written = yaml.safe_load(path.read_text())
    assert (written["distributed_type"], written["mixed_precision"]) == ("XLA", "fp16")
    assert "main_process_ip" not in written
    assert "fp16" not in written
    assert str(path) in capsys.readouterr().out


def test_the_parser_fits_under_another_one() -> None:
    above = argparse.ArgumentParser()
    get_config_parser(above.add_subparsers())
    assert above.parse_args(["config", "default"]).mixed_precision == "no"


def test_without_questions_the_command_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="accelerate config default"):
        run()


def test_names_are_found_and_others_are_not() -> None:
    assert default_config_file.endswith("accelerate/default_config.yaml")
    assert "load_config_from_file" in dir(command)
    assert not hasattr(command, "nothing")
