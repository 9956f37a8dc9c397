"""A launch with DeepSpeed: options, a file of DeepSpeed's own, and its entries in the launcher's file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import make_config

from accelerate._base.errors import ConfigurationError
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.config.deepspeed import explain_launch
from accelerate.config.plugins.deepspeed import DeepSpeedPlugin
from accelerate.config.resolve import resolve
from accelerate.config.run_config import encode
from accelerate.devices.machine import Machine

MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def zero(**entries: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 2, **entries}}


def explained(**flags: Any) -> dict[str, tuple[Any, str]]:
    return {name: (value, origin) for name, value, origin in explain_launch(make_config(use_deepspeed=True, **flags))}


def write(folder: Path, config: Any) -> str:
    file = folder / "ds.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(file)


def test_a_launch_by_options_is_explained() -> None:
    rows = explained(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/disk", mixed_precision="fp16")
    assert rows["zero_optimization.stage"] == (3, "flag --zero_stage")
    assert rows["zero_optimization.offload_param.nvme_path"] == ("/disk", "flag --offload_param_nvme_path")
    assert rows["zero_optimization.offload_optimizer.device"] == ("none", "default")
    assert rows["zero_optimization.stage3_gather_16bit_weights_on_model_save"] == (False, "default")
    assert rows["fp16.enabled"] == (True, "flag --mixed_precision")
    assert rows[MICRO] == ("auto", "filled by the program: the batch size of the prepared loader")
    assert rows[STEPS] == ("auto", "filled by the program: Accelerator(gradient_accumulation_steps=...)")
    assert rows["steps_per_print"][0] == float("inf")
    assert explained()["zero_optimization.stage"] == (2, "default")


def test_a_launch_by_a_file_is_explained(tmp_path: Path) -> None:
    config = {
        **zero(stage="auto", overlap_comm="auto"),
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    path = write(tmp_path, config)
    rows = explained(deepspeed_config_file=path, gradient_accumulation_steps=4, gradient_clipping=0.5)
    assert rows["zero_optimization.stage"] == (2, "default")
    assert rows["zero_optimization.overlap_comm"] == ("auto", "left out: DeepSpeed's default")
    assert rows["gradient_accumulation_steps"] == (4, "flag --gradient_accumulation_steps")
    assert rows["gradient_clipping"] == (0.5, "flag --gradient_clipping")
    assert rows["bf16.enabled"] == (True, f"file {path}")
    assert rows["optimizer.params.lr"] == ("auto", "filled by the program: DummyOptim(...)")


@pytest.mark.parametrize(
    ("config", "flags", "told"),
    [
        ("{", {}, "it is no JSON, in line 1"),
        (zero(stage=4), {}, "zero_optimization.stage=4 is not a stage"),
        (zero(stage=2), {"zero_stage": 3}, "zero_optimization.stage=2 contradicts 3, which flag --zero_stage gives"),
        (
            {**zero(), "fp16": {"enabled": True}},
            {"mixed_precision": "bf16"},
            "fp16.enabled=True contradicts False, which flag --mixed_precision gives",
        ),
    ],
)
def test_a_faulty_file_ends_the_launch(config: Any, flags: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = write(tmp_path, config)
    with pytest.raises(ConfigurationError) as caught:
        explained(deepspeed_config_file=path, **flags)
    assert told in str(caught.value)
    assert "ds.json" in str(caught.value)


def test_options_of_the_launchers_file_stand_in_one_place(tmp_path: Path) -> None:
    launcher_file = tmp_path / "config.yaml"
    path = write(tmp_path, zero())
    options = {"deepspeed_config_file": path, "zero_stage": 2}
    launcher_file.write_text(json.dumps({"distributed_type": "DEEPSPEED", "deepspeed_config": options}))
    namespace = launch_command_parser().parse_args(["--config_file", str(launcher_file), "train.py"])
    with pytest.raises(ConfigurationError, match=r"launcher gives zero_stage, which DeepSpeed's own"):
        explain_launch(resolve(namespace, Machine(cpu_count=1), environ={}))


def test_the_launch_command_refuses_and_explains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('the script ran')")
    words = ["--cpu", "--use_deepspeed", "--deepspeed_config_file"]
    parser = launch_command_parser()
    launch_command(parser.parse_args(["--explain", *words, write(tmp_path, zero()), str(script)]))
    told = capfd.readouterr().out
    assert "DeepSpeed's configuration" in told
    assert "zero_optimization.stage" in told
    assert "filled by the program: the batch size of the prepared loader" in told
    with pytest.raises(ConfigurationError, match=r"zero_optimization.stage=5 is not a stage"):
        launch_command(parser.parse_args([*words, write(tmp_path, zero(stage=5)), str(script)]))
    assert "the script ran" not in capfd.readouterr().out


def test_neither_torch_nor_deepspeed_is_loaded() -> None:
    loaded = "import sys, accelerate.config.deepspeed; print(sorted({'torch', 'deepspeed', 'transformers'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_options_that_cannot_work_end_the_launch() -> None:
    with pytest.raises(ConfigurationError, match=r"The options of this launch: .*device='nvme' needs a folder"):
        explained(offload_optimizer_device="nvme")


# --- entries in the launcher's file ------------------------------------------------------------------------------------


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
