"""Files of options: every key goes round, old files load, and a wrong line is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate._base.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accelerate._base.errors import ConfigurationError
from accelerate.commands.config.default import write_basic_config
from accelerate.config.cluster_config import ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.config.file_text import load_text
from accelerate.config.files import SAGEMAKER_KEYS, known_keys, read_config_file, section_keys
from accelerate.config.sections.registry import SECTIONS, options

BASE: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}


def write(folder: Path, content: dict[str, Any] | str, name: str = "config.yaml") -> str:
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content) if name.endswith("json") else yaml.dump(content)
    path.write_text(text)
    return str(path)


# A value that is not the default, for each key.
SAMPLES: dict[str, Any] = {
    "deepspeed_entries": {"aio": {"block_size": 7}},
    "mixed_precision": "bf16",
    "gpu_ids": "0,1",
    "main_process_ip": "10.0.0.1",
    "rdzv_backend": "c10d",
    "tpu_vm": ["a", "b"],
    "tpu_env": ["A=1"],
    "commands": ["echo a,b", "[ -e x ]"],
    "fsdp_reshard_after_forward": False,
    "fp8_override_linear_precision": [True, False, True],
    "gradient_clipping": 0.5,
    # False says something about another key as well.
    "fsdp_sync_module_states": True,
}


def sample(key: str) -> Any:
    if key in SAMPLES:
        return SAMPLES[key]
    option = next(option for option in options().values() if option.file_key == key)
    if option.knob.choices:
        return option.knob.choices[-1]
    texts = ("true", "0.25", "7", "some_text")
    for text in texts:
        try:
            value = option.knob.codec.parse(text)
        except ValueError:
            continue
        return value if value != option.default else option.knob.codec.parse("false" if text == "true" else "9")
    raise AssertionError(key)


def keys_of_files() -> list[tuple[str | None, str]]:
    return [(option.section.file_key, option.file_key) for option in options().values() if option.file_key is not None]


def test_objects_have_an_attribute_for_each_key() -> None:
    fields = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert fields == set(known_keys()) - {"tpu_cluster"}
    sagemaker = {field.name for field in dataclasses.fields(SageMakerConfig)}
    assert sagemaker == set(known_keys(on_sagemaker=True))
    assert set(SAGEMAKER_KEYS) <= sagemaker


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "distributed_type: NO\nnum_processes: 2\ndebug: true\nnum_processes: 4\n",
            "'num_processes' twice, on lines 2 and 4",
        ),
        ('distributed_type: NO\n"debug": true\ndebug: false\n', "'debug' twice, on lines 2 and 3"),
        ("distributed_type: NO\ndebug: true\ndebug: 1\n", "'debug' twice, on lines 2 and 3"),
        (
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_version: 1\n",
            "'fsdp_version' twice, on lines 3 and 4",
        ),
        ("{distributed_type: NO, debug: true,\n debug: false}\n", "'debug' twice, on lines 1 and 2"),
        ("- [{a: 1, a: 2}]\n", "'a' twice, on lines 1 and 1"),
    ],
)
def test_a_key_that_is_there_twice_is_named_with_its_lines(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        read_config_file(path)
    assert str(caught.value).startswith(f"The configuration file {path!r} has the key {said}")


def test_a_key_that_is_there_twice_in_json_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, '{"distributed_type": "NO", "num_processes": 2, "num_processes": 4}', "config.json")
    with pytest.raises(ConfigurationError, match="'num_processes' twice"):
        read_config_file(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nfsdp_config:\n  fsdp_version: 2\n"),
        ("config.json", '{"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_version": 2}}'),
    ],
)
def test_a_key_that_is_there_twice_with_one_value_is_read(tmp_path: Path, name: str, text: str) -> None:
    assert load_text(write(tmp_path, text, name)) == {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


def test_the_same_key_in_two_dictionaries_and_merged_ones_are_no_repetition(tmp_path: Path) -> None:
    merged = load_text(write(tmp_path, "a: &a {k: 1, l: 1}\nb:\n  <<: *a\n  k: 2\nc: &c [*a, *a]\n"))
    assert merged["b"] == {"k": 2, "l": 1}
    assert merged["c"][1] is merged["a"]


@pytest.mark.parametrize(("section", "key"), keys_of_files())
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_every_key_goes_to_its_option_and_round(tmp_path: Path, section: str | None, key: str, ending: str) -> None:
    value = sample(key)
    content = BASE | ({key: value} if section is None else {section: {key: value}})
    path = write(tmp_path, content, f"config.{ending}")
    option = next(option for option in options().values() if option.file_key == key)
    (name, entry), *others = read_config_file(path).values.items()
    assert (name, others) == (option.name, [])
    assert entry.value == option.knob.codec.load(value)

    config = load_config_from_file(path)
    again = str(tmp_path / f"again.{ending}")
    (config.to_json_file if ending == "json" else config.to_yaml_file)(again)
    assert load_config_from_file(again) == config
    assert read_config_file(again).values[name].value == entry.value


@pytest.mark.parametrize("section", [section for section in SECTIONS if section.prefix], ids=lambda s: s.file_key)
def test_keys_of_a_dictionary_may_leave_its_prefix_out(tmp_path: Path, section: Any) -> None:
    names = [key for key in section_keys(section.file_key) if key.startswith(section.prefix)]
    current = [key for key in names if any(option.file_key == key for option in options().values())]
    content = BASE | {section.file_key: {key.removeprefix(section.prefix): sample(key) for key in current}}
    assert len(read_config_file(write(tmp_path, content)).values) == len(current) > 0


def test_an_object_is_typed_and_writes_no_empty_values(tmp_path: Path) -> None:
    config = load_config_from_file(write(tmp_path, BASE | {"downcast_bf16": "no", "gpu_ids": 0}))
    assert isinstance(config, ClusterConfig)
    assert config.compute_environment is ComputeEnvironment.LOCAL_MACHINE
    assert config.distributed_type is DistributedType.NO
    assert (config.num_processes, config.use_cpu, config.debug, config.downcast_bf16, config.gpu_ids) == (
        1,
        False,
        False,
        False,
        "0",
    )
    written = config.to_dict()
    assert "fsdp_config" not in written
    assert "main_process_ip" not in written
    assert written["distributed_type"] == "NO"


def test_content_without_a_file_is_processed_the_same_way() -> None:
    processed = ClusterConfig.process_config({"distributed_type": "NO", "fp16": True, "dynamo_backend": "INDUCTOR"})
    assert ClusterConfig(**processed).to_dict() == {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO",
        "mixed_precision": "fp16",
        "num_processes": 1,
        "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "debug": False,
        "downcast_bf16": False,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": 1,
        "rdzv_backend": "static",
        "same_network": False,
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": False,
    }
    with pytest.raises(ValueError, match="distributed_type"):
        ClusterConfig.process_config({"num_processes": 1})


def test_a_job_on_sagemaker_is_its_own_object(tmp_path: Path) -> None:
    content = {
        "compute_environment": "AMAZON_SAGEMAKER",
        "distributed_type": "DATA_PARALLEL",
        "ec2_instance_type": "ml.p3.16xlarge",
        "iam_role_name": "role",
        "num_machines": 2,
    }
    config = load_config_from_file(write(tmp_path, content))
    assert isinstance(config, SageMakerConfig)
    assert config.distributed_type is SageMakerDistributedType.DATA_PARALLEL
    assert (config.region, config.num_machines, config.base_job_name) == ("us-east-1", 2, "accelerate-sagemaker-1")
    with pytest.raises(ConfigurationError, match="no ClusterConfig"):
        ClusterConfig.from_yaml_file(write(tmp_path, content))
    del content["iam_role_name"]
    with pytest.raises(ConfigurationError, match="'iam_role_name'"):
        load_config_from_file(write(tmp_path, content))


# --- old files -------------------------------------------------------------------------------------------------------

OLD = {
    "0.11": (
        """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: FSDP
fsdp_config:
  min_num_params: 2000
  offload_params: false
  sharding_strategy: 1
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
""",
        {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_min_num_params": 2000, "num_processes": 2},
    ),
    "first": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nfp16: true\nnum_processes: 2\n",
        {"mixed_precision": "fp16"},
    ),
    "0.12": (
        """
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: 3
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: BertLayer
gpu_ids: null
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
""",
        {
            "fsdp_sharding_strategy": "NO_SHARD",
            "fsdp_backward_prefetch": "BACKWARD_PRE",
            "downcast_bf16": False,
            "same_network": True,
        },
    ),
    "0.17": (
        """
command_file: null
commands: null
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: TPU
downcast_bf16: 'yes'
dynamo_backend: INDUCTOR
fsdp_config: {}
megatron_lm_config: {}
machine_rank: 0
main_training_function: main
mixed_precision: no
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_name: null
tpu_zone: null
use_cpu: false
""",
        {"dynamo_backend": "inductor", "downcast_bf16": True, "mixed_precision": "no", "num_processes": 8},
    ),
    "0.30": (
        """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
ipex_config:
  ipex: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
mpirun_config:
  mpirun_ccl: '1'
  mpirun_hostfile: /hosts
num_machines: 2
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
""",
        {"mpirun_hostfile": "/hosts", "num_processes": 4, "cpu": True},
    ),
    "1.0": (
        """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fp8_config:
  amax_compute_algorithm: most_recent
  amax_history_length: 512
  backend: TE
  fp8_format: E4M3
  interval: 1
  margin: 0
  optimization_level: O1
  override_linear_precision: false,false,true
  use_autocast_during_eval: false
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
mixed_precision: fp8
num_processes: 2
""",
        {
            "fp8_backend": "te",
            "fp8_amax_history_len": 512,
            "fp8_opt_level": "O1",
            "fp8_override_linear_precision": (False, False, True),
            "fsdp_reshard_after_forward": "true",
        },
    ),
    "1.4": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: TP\ntp_config:\n  tp_size: 4\nnum_processes: 4\n",
        {"parallelism_config_tp_size": 4},
    ),
}


@pytest.mark.parametrize("version", OLD)
def test_old_files_load(tmp_path: Path, version: str) -> None:
    text, expected = OLD[version]
    path = write(tmp_path, text)
    values = read_config_file(path).values
    assert {name: values[name].value for name in expected} == expected
    config = load_config_from_file(path)
    config.to_yaml_file(tmp_path / "new.yaml")
    again = read_config_file(tmp_path / "new.yaml")
    assert {name: again.values[name].value for name in expected} == expected
    assert again.notes == ()


def test_what_an_old_file_says_in_vain_is_noted(tmp_path: Path) -> None:
    notes = read_config_file(write(tmp_path, OLD["0.30"][0])).notes
    assert len(notes) == 2
    assert "'ipex_config'" in notes[0]
    assert "'mpirun_config.mpirun_ccl'" in notes[1]


# --- wrong files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (BASE | {"num_proceses": 2}, ["'num_proceses'", "Did you mean 'num_processes'?"]),
        (BASE | {"fsdp_config": {"fsdp_verson": 2}}, ["'fsdp_verson'", "'fsdp_config'", "'fsdp_version'"]),
        (BASE | {"fsdp_version": 2}, ["'fsdp_version'", "It belongs into 'fsdp_config'"]),
        (BASE | {"num_processes": "two"}, ["num_processes: 'two'", "a whole number"]),
        (BASE | {"num_processes": True}, ["num_processes: True", "a whole number"]),
        (BASE | {"num_processes": [2]}, ["num_processes: [2]", "a whole number"]),
        (BASE | {"debug": "maybe"}, ["debug: 'maybe'", "true or false"]),
        (BASE | {"mixed_precision": "bf61"}, ["mixed_precision: 'bf61'", "Did you mean 'bf16'?"]),
        (BASE | {"mixed_precision": True}, ["mixed_precision: True"]),
        (BASE | {"fsdp_config": {"fsdp_version": 3}}, ["fsdp_config.fsdp_version: 3", "one of 1, 2"]),
        (BASE | {"fsdp_config": "FULL_SHARD"}, ["fsdp_config: 'FULL_SHARD'", "keys of its own"]),
        ({"distributed_type": "FDSP"}, ["'FDSP'", "Did you mean 'FSDP'?"]),
        ({"num_processes": 2}, ["'distributed_type'"]),
        ({**BASE, "compute_environment": "MOON"}, ["'MOON'", "LOCAL_MACHINE"]),
        ("num_processes: 2\n  bad: [", ["line 2", "not YAML"]),
        ("just words", ["holds str"]),
        ("", ["holds NoneType"]),
    ],
)
def test_a_wrong_file_is_named_with_key_and_remedy(tmp_path: Path, content: Any, words: list[str]) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigurationError) as caught:
        load_config_from_file(path)
    for word in [path, *words]:
        assert word in str(caught.value)


def test_a_file_that_is_not_json_or_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="line 2, is not JSON"):
        load_config_from_file(write(tmp_path, '{"a": 1,\n b}', "broken.json"))
    with pytest.raises(FileNotFoundError, match=r"gone\.yaml"):
        load_config_from_file(str(tmp_path / "gone.yaml"))
    with pytest.raises(ConfigurationError, match=tmp_path.name):
        load_config_from_file(tmp_path)


def test_the_default_file_follows_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    place = tmp_path / "accelerate" / "default_config.yaml"
    with pytest.raises(FileNotFoundError, match=r"default_config\.yaml"):
        load_config_from_file(None)
    assert write_basic_config(save_location=place) == place
    assert isinstance(load_config_from_file(None), ClusterConfig)


def test_a_basic_file_is_written_once_and_is_right(tmp_path: Path) -> None:
    path = tmp_path / "below" / "config.yaml"
    assert write_basic_config("bf16", path) == path
    assert json.loads(path.read_text())["mixed_precision"] == "bf16"
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    assert config.num_processes >= 1
    before = path.read_text()
    assert write_basic_config("fp16", path) is False
    assert path.read_text() == before
    with pytest.raises(ValueError, match="'fp7'"):
        write_basic_config("fp7", tmp_path / "other.yaml")


def test_a_list_of_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {**BASE, "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": ["Block", {"a": 1}]}})
    with pytest.raises(ConfigurationError, match=r"fsdp_transformer_layer_cls_to_wrap.*names between commas"):
        read_config_file(path)


def test_a_json_file_is_read_as_the_class_that_it_describes(tmp_path: Path) -> None:
    path = write(tmp_path, {**BASE, "num_processes": 1, "mixed_precision": "bf16"}, "config.json")
    assert ClusterConfig.from_json_file(path).mixed_precision == "bf16"
    with pytest.raises(ConfigurationError, match=r"config.json' says compute_environment: LOCAL_MACHINE, so it is no "):
        SageMakerConfig.from_json_file(path)
