"""DeepSpeed entries in the `deepspeed_config` section of the launcher's file reach the configuration of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate._base.errors import ConfigurationError
from accelerate.commands.launch import launch_command_parser
from accelerate.config.deepspeed import explain_launch
from accelerate.config.plugins.deepspeed import DeepSpeedPlugin
from accelerate.config.resolve import resolve
from accelerate.config.run_config import encode
from accelerate.devices.machine import Machine


def launched(section: str, folder: Path) -> dict[str, str]:
    """Return the variables of a launch whose file has this `deepspeed_config`."""
    file = folder / "launch.yaml"
    file.write_text(f"distributed_type: DEEPSPEED\ndeepspeed_config:\n{section}")
    return encode(
        resolve(
            launch_command_parser().parse_args(["--config_file", str(file), "train.py"]),
            Machine(cpu_count=1),
            environ={},
        )
    )


def test_an_entry_of_deepspeed_in_the_launchers_file_reaches_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = """\
  zero_stage: 3
  seq_parallel_communication_data_type: bf16
  zero_optimization:
    overlap_comm: true
  aio: {block_size: 1048576}
"""
    for name, value in launched(section, tmp_path).items():
        monkeypatch.setenv(name, value)
    config = DeepSpeedPlugin().deepspeed_config
    assert config["seq_parallel_communication_data_type"] == "bf16"
    assert config["aio"] == {"block_size": 1048576}
    assert (config["zero_optimization"]["stage"], config["zero_optimization"]["overlap_comm"]) == (3, True)
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    monkeypatch.delenv("ACCELERATE_CONFIG_DS_FIELDS")
    own = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}}).deepspeed_config
    assert own["seq_parallel_communication_data_type"] == "bf16"
    with pytest.raises(ConfigurationError, match="seq_parallel_communication_data_type='fp16'"):
        DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": {"stage": 3}, "seq_parallel_communication_data_type": "fp16"}
        )


def test_an_entry_may_say_what_an_option_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in launched("  zero_optimization: {stage: 3}\n", tmp_path).items():
        monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.zero3_init_flag) == (3, True)
    with pytest.raises(ConfigurationError, match=r"stage=3 contradicts 2"):
        DeepSpeedPlugin(zero_stage=2)


def test_a_misspelled_entry_in_the_launchers_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'sequence_parallel_communication_data_type'.*'seq_parallel_"):
        launched("  sequence_parallel_communication_data_type: bf16\n", tmp_path)


def test_entries_of_the_launchers_file_are_explained(tmp_path: Path) -> None:
    file = tmp_path / "launch.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {aio: {block_size: 7}}")
    run = resolve(
        launch_command_parser().parse_args(["--config_file", str(file), "train.py"]), Machine(cpu_count=1), environ={}
    )
    rows = {name: (value, origin) for name, value, origin in explain_launch(run)}
    assert rows["aio.block_size"][0] == 7
