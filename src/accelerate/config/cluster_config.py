"""Files of options as objects with one attribute a key."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate._base.constants import (
    SAGEMAKER_PYTHON_VERSION,
    SAGEMAKER_PYTORCH_VERSION,
    SAGEMAKER_TRANSFORMERS_VERSION,
)
from accelerate._base.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accelerate._base.errors import ConfigurationError
from accelerate.config import files
from accelerate.config.file_text import load_text
from accelerate.config.files import ConfigFile, check, kind_of, write_text
from accelerate.config.sections.registry import options

if TYPE_CHECKING:
    from typing_extensions import Self

C = TypeVar("C", bound="BaseConfig")


@dataclass
class BaseConfig:
    """What files for a cluster and for SageMaker have in common."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        kind = SageMakerDistributedType if isinstance(self, SageMakerConfig) else DistributedType
        self.distributed_type = kind(self.distributed_type)

    def to_dict(self) -> dict[str, Any]:
        """Return the values as plain ones, without those that say nothing."""
        values = {item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self)}
        return {key: value for key, value in values.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a file in the keys of today, with the defaults that every file has.

        Raises:
            ConfigurationError: It does not say its `distributed_type`.
        """
        return _with_defaults(check(config_dict, "process_config(...)"))

    @classmethod
    def from_json_file(cls, json_file: str | None = None) -> Self:
        """Read a JSON file.

        Raises:
            ConfigurationError: It is missing, does not parse, or holds an unknown key or a wrong type.
        """
        return _load(cls, json_file or files.default_json_config_file)

    @classmethod
    def from_yaml_file(cls, yaml_file: str | None = None) -> Self:
        """Read a YAML file.

        Raises:
            ConfigurationError: It is missing, does not parse, or holds an unknown key or a wrong type.
        """
        return _load(cls, yaml_file or files.default_yaml_config_file)

    def to_json_file(self, json_file: str | Path) -> None:
        """Write a JSON file.

        Raises:
            ConfigurationError: (also an `OSError`) it cannot be written there.
        """
        write_text(json_file, json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    def to_yaml_file(self, yaml_file: str | Path) -> None:
        """Write a YAML file.

        Raises:
            ConfigurationError: (also an `OSError`) it cannot be written there.
        """
        import yaml

        write_text(yaml_file, yaml.safe_dump(self.to_dict()))


@dataclass
class ClusterConfig(BaseConfig):
    """Options of runs on this machine or on a cluster."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] | None = None
    tpu_vm: list[str] | None = None
    tpu_env: list[str] | None = None
    dynamo_config: dict[str, Any] | None = None


@dataclass
class SageMakerConfig(BaseConfig):
    """Options of jobs on Amazon SageMaker."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = f"accelerate-sagemaker-{num_machines}"
    pytorch_version: str = SAGEMAKER_PYTORCH_VERSION
    transformers_version: str = SAGEMAKER_TRANSFORMERS_VERSION
    py_version: str = SAGEMAKER_PYTHON_VERSION
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False


def load_config_from_file(config_file: str | Path | None) -> ClusterConfig | SageMakerConfig:
    """Read a file of options, the default one where none is named.

    Raises:
        ConfigurationError: It is missing (then also a `FileNotFoundError`), does not parse, or holds an unknown key or a
            wrong type.
    """
    path = Path(config_file).expanduser() if config_file is not None else files.current_default_file()
    return from_checked(check(load_text(path), str(path)))


def from_checked(file: ConfigFile) -> ClusterConfig | SageMakerConfig:
    """Make the object of a file that was read and found right.

    Raises:
        ConfigurationError: A key that SageMaker needs is missing.
    """
    values = _with_defaults(file)
    if file.sagemaker is None:
        return ClusterConfig(**values)
    for key in ("ec2_instance_type", "iam_role_name"):
        if key not in values:
            raise ConfigurationError(
                f"The configuration file {file.path!r} describes a job on SageMaker and has no key {key!r}, which such "
                "a job needs. Add it."
            )
    return SageMakerConfig(**values)


def _with_defaults(file: ConfigFile) -> dict[str, Any]:
    values = dict(file.data)
    # Values of the top level in their types and under the keys of today; dictionaries as the file has them.
    for name, entry in file.values.items():
        if "." not in entry.key:
            del values[entry.key]
            values[options()[name].file_key or name] = entry.value
    processes = kind_of(file.distributed_type).num_processes
    if file.sagemaker is None and processes is not None:
        values.setdefault("num_processes", processes)
    defaults = {"mixed_precision": None, "use_cpu": False, "debug": False, "enable_cpu_affinity": False}
    return defaults | values


def _load(cls: type[C], path: str | Path) -> C:
    loaded = load_config_from_file(path)
    if not isinstance(loaded, cls):
        raise ConfigurationError(
            f"The configuration file {str(path)!r} says compute_environment: {loaded.compute_environment.value}, so it is "
            f"no {cls.__name__}. Read it with {type(loaded).__name__}."
        )
    return loaded


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
