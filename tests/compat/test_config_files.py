"""Every key and value that `accelerate config` of a release since 0.11 wrote into a file is read.

`config_file_keys.json` was made by answering the questions of each release from 0.11.0 to 1.15.0 three hundred times at
random and collecting what the files held; free texts stand for all others of their key.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate.config.cli import add_launch_arguments
from accelerate.config.cluster_config import load_config_from_file
from accelerate.config.files import read_config_file
from accelerate.config.resolve import merge
from accelerate.config.run_config import RunConfig, encode
from accelerate.devices.machine import Machine

KEYS: dict[str, dict[str, list[Any]]] = json.loads(Path(__file__).with_name("config_file_keys.json").read_text())
BASES: dict[str, dict[str, Any]] = {
    "local": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 4},
    "sagemaker": {
        "compute_environment": "AMAZON_SAGEMAKER",
        "distributed_type": "NO",
        "ec2_instance_type": "ml.p3.2xlarge",
        "iam_role_name": "role",
    },
}
GPUS = Machine(device_type="cuda", device_count=4, cpu_count=8, visible_devices_variable="CUDA_VISIBLE_DEVICES")


def written(folder: Path, where: str, key: str, value: Any) -> str:
    section, dot, inner = key.partition(".")
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({**BASES[where], section: {inner: value} if dot else value}))
    return str(path)


def launched(path: str) -> RunConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_launch_arguments(parser)
    return merge(parser.parse_args(["--config_file", path, "train.py"]), GPUS, environ={})


@pytest.mark.parametrize(("where", "key"), [(where, key) for where, keys in KEYS.items() for key in keys])
def test_what_earlier_releases_wrote_loads_and_reaches_the_worker(tmp_path: Path, where: str, key: str) -> None:
    for value in KEYS[where][key]:
        path = written(tmp_path, where, key, value)
        config = load_config_from_file(path)
        assert encode(launched(path))["ACCELERATE_MIXED_PRECISION"] in ("no", "fp16", "bf16", "fp8")
        # Written again in the keys of today, it says the same, without a word about what is gone.
        config.to_yaml_file(str(tmp_path / "again.yaml"))
        again = read_config_file(tmp_path / "again.yaml")
        assert again.notes == ()
        said = {name: entry.value for name, entry in read_config_file(path).values.items()}
        assert {name: again.values[name].value for name in said} == said


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("(false, false, false)", (False, False, False)),
        ("(true, false, true)", (True, False, True)),
        ("[false, true, false]", (False, True, False)),
        ("false", (False, False, False)),
        ("true,false,true", (True, False, True)),
    ],
)
def test_the_parts_of_fp8_are_read_in_every_form_that_files_had(
    tmp_path: Path, text: str, flags: tuple[bool, ...]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"distributed_type: NO\nmixed_precision: fp8\nfp8_config:\n  backend: TE\n  override_linear_precision: {text}\n"
    )
    config = launched(str(path))
    assert config["fp8_override_linear_precision"] == flags
    variables = encode(config)
    names = [f"ACCELERATE_FP8_OVERRIDE_{part}" for part in ("FPROP", "DGRAD", "WGRAD")]
    assert [variables[name] for name in names] == [str(flag) for flag in flags]


@pytest.mark.parametrize(
    ("name", "used"),
    [("AOT_CUDAGRAPHS", "cudagraphs"), ("IPEX", "no"), ("NVFUSER", "no"), ("AOT_NVFUSER", "no")],
)
def test_a_compiler_that_is_gone_is_named_and_a_renamed_one_is_used(tmp_path: Path, name: str, used: str) -> None:
    config = launched(written(tmp_path, "local", "dynamo_config.dynamo_backend", name))
    assert config["dynamo_backend"] == used
    assert [name in note for note in config.notes] == ([True] if used == "no" else [])


def test_a_file_that_keeps_weights_from_the_others_lets_each_process_read_them(tmp_path: Path) -> None:
    config = launched(written(tmp_path, "local", "fsdp_config.fsdp_sync_module_states", False))
    assert config["fsdp_cpu_ram_efficient_loading"] is False
