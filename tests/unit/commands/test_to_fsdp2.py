"""`accelerate to-fsdp2`: the file that it writes and the changes that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import reset_warnings
from accelerate.commands import accelerate_cli
from accelerate.commands.to_fsdp2 import (
    ARGUMENT_KEY_MAPPING,
    ARGUMENT_VALUE_MAPPING,
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)
from accelerate.config.files import read_config_file
from accelerate.config.knob import knobs
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.sections.engines import FsdpOptions

VERSION_1: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_offload_params": False,
        "fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_sync_module_states": True,
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_use_orig_params": True,
    },
    "mixed_precision": "bf16",
    "num_processes": 2,
}
VERSION_2 = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_offload_params": False,
    "fsdp_reshard_after_forward": False,
    "fsdp_transformer_layer_cls_to_wrap": "Block",
    "fsdp_version": 2,
}
REMOVED = ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump(VERSION_1))
    return path


def test_a_file_is_converted_and_every_change_is_named(old_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_file = old_file.with_name("new.yaml")
    assert accelerate_cli.run(["to-fsdp2", "--config_file", str(old_file), "--output_file", str(new_file)]) == 0
    assert yaml.safe_load(new_file.read_text()) == {**VERSION_1, "fsdp_config": VERSION_2}
    assert read_config_file(new_file).distributed_type == "FSDP"  # it passes the check that launch makes
    said = capsys.readouterr().out
    assert "fsdp_sharding_strategy: SHARD_GRAD_OP becomes fsdp_reshard_after_forward: false." in said
    assert all(f"- {key}: " in said and "is left out" in said for key in REMOVED)
    assert yaml.safe_load(old_file.read_text()) == VERSION_1


def test_a_file_is_replaced_on_request_only(old_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cli.run(["to-fsdp2", "--config-file", str(old_file)]) != 0
    assert "--overwrite" in capsys.readouterr().err
    assert accelerate_cli.run(["to-fsdp2", "--config_file", str(old_file), "--output_file", str(old_file)]) != 0
    assert yaml.safe_load(old_file.read_text()) == VERSION_1
    assert accelerate_cli.run(["to-fsdp2", "--config_file", str(old_file), "--overwrite"]) == 0
    assert yaml.safe_load(old_file.read_text())["fsdp_config"] == VERSION_2


@pytest.mark.parametrize(
    ("strategy", "frees"),
    [
        ("FULL_SHARD", True),
        ("SHARD_GRAD_OP", False),
        ("HYBRID_SHARD", True),
        ("NO_SHARD", False),
        (1, True),
        ("2", False),
    ],
)
def test_strategies_become_yes_or_no(strategy: object, frees: bool, recwarn: pytest.WarningsRecorder) -> None:
    reset_warnings()
    converted = convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": strategy}})
    assert converted["fsdp_config"] == {"fsdp_reshard_after_forward": frees, "fsdp_version": 2}
    said = " ".join(str(entry.message) for entry in recwarn)
    assert ("parallelism_config_dp_shard_size" in said) == ("HYBRID" in str(strategy))
    assert ("MULTI_GPU" in said) == (strategy == "NO_SHARD")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("LOCAL_STATE_DICT", "SHARDED_STATE_DICT"),
        ("local_state_dict", "SHARDED_STATE_DICT"),
        ("FULL_STATE_DICT", "FULL_STATE_DICT"),
        ("SHARDED_STATE_DICT", "SHARDED_STATE_DICT"),
    ],
)
def test_a_form_of_weights_that_version_2_lacks_is_replaced(
    tmp_path: Path, given: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new" / "file.yaml"
    old.write_text(yaml.safe_dump({**VERSION_1, "fsdp_config": {"fsdp_state_dict_type": given}}))
    assert accelerate_cli.run(["to-fsdp2", "--config_file", str(old), "--output_file", str(new)]) == 0
    written = yaml.safe_load(new.read_text())["fsdp_config"]
    assert written == {"fsdp_state_dict_type": kept, "fsdp_version": 2}
    FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=written["fsdp_state_dict_type"])
    said = capsys.readouterr().out
    change = f"- fsdp_state_dict_type: {given} becomes fsdp_state_dict_type: SHARDED_STATE_DICT.\n- Note on {given}: "
    assert (change in said) == ("LOCAL" in given.upper())


@pytest.mark.parametrize("target", ["/proc/none/new.yaml", "."])
def test_a_place_that_cannot_be_written_is_one_line(
    old_file: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config_file", str(old_file), "--output_file", target, "--overwrite"]
    assert accelerate_cli.run(["to-fsdp2", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert repr(target) in said


def test_what_is_converted_already_stays() -> None:
    config = {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}}
    reset_warnings()
    with pytest.warns(UserWarning, match="already"):
        assert convert_config_to_fsdp2(config) is config
    with pytest.warns(UserWarning, match="no fsdp_config"):
        assert convert_config_to_fsdp2({"num_processes": 1}) == {"num_processes": 1}


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    with pytest.raises(ConfigurationError, match="empty"):
        load_config(empty)


def test_every_option_is_known() -> None:
    options = set(knobs(FsdpOptions))
    assert options <= ARGUMENT_KEY_MAPPING.keys(), options - ARGUMENT_KEY_MAPPING.keys()
    assert ARGUMENT_VALUE_MAPPING.keys() <= ARGUMENT_KEY_MAPPING.keys()


def test_a_file_with_an_empty_mapping_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("{}\n")
    with pytest.raises(ConfigurationError, match=r"config.yaml' is empty.*nothing to convert.*`accelerate config`"):
        load_config(path)


def test_a_version_that_was_written_down_is_replaced() -> None:
    reset_warnings()
    with pytest.warns(UserWarning, match="fsdp_version becomes 2"):
        converted = convert_config_to_fsdp2({"fsdp_config": {"fsdp_version": 1, "fsdp_offload_params": True}})
    section = converted["fsdp_config"]
    assert (section["fsdp_version"], section["fsdp_offload_params"]) == (2, True)


@pytest.mark.parametrize("options", [["--overwrite"], ["--output_file", "new.yaml"], []], ids=" ".join)
def test_a_missing_file_is_not_found(tmp_path: Path, options: list[str]) -> None:
    args = to_fsdp2_command_parser().parse_args(["--config_file", str(tmp_path / "absent.yaml"), *options])
    with pytest.raises(FileNotFoundError, match=r"absent\.yaml") as caught:
        to_fsdp2_command(args)
    assert isinstance(caught.value, ConfigurationError)


def test_a_file_that_would_be_lost_exists(tmp_path: Path) -> None:
    source, target = tmp_path / "old.yaml", tmp_path / "kept.yaml"
    source.write_text("fsdp_config: {fsdp_version: 1}\n")
    target.write_text("kept")
    args = to_fsdp2_command_parser().parse_args(["--config_file", str(source), "--output_file", str(target)])
    with pytest.raises(FileExistsError, match=r"kept\.yaml") as caught:
        to_fsdp2_command(args)
    assert isinstance(caught.value, ConfigurationError)
    assert target.read_text() == "kept"
