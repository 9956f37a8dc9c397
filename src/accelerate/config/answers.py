"""Turn the answers of `accelerate config` into the content of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate._base.enums import ComputeEnvironment, DistributedType
from accelerate.config.cluster_config import ClusterConfig
from accelerate.config.questions import ENGINE, KIND, implied
from accelerate.config.sections.compute import Fp8Options
from accelerate.config.sections.registry import LaunchOption, options

_FLAGS = {"true": True, "false": False}


def cluster_config(answers: Mapping[str, Any]) -> ClusterConfig:
    """Return the file that answers to the questions about this machine or a cluster make."""
    values = implied(answers)
    kind = values[ENGINE] or values[KIND]
    content: dict[str, Any] = {
        "compute_environment": ComputeEnvironment.LOCAL_MACHINE,
        "distributed_type": DistributedType(kind),
        "mixed_precision": values["mixed_precision"],
        "use_cpu": bool(values["cpu"]),
        "debug": bool(values["debug"]),
        # One process, where no number was asked for.
        "num_processes": values["num_processes"] or 1,
    }
    content |= by_section(answers)
    return ClusterConfig(**content)


def by_section(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return answers under the keys of files: in the dictionaries of their sections, or at the top.

    A section that was answered by "no" alone is left out.
    """
    content: dict[str, Any] = {}
    for name, value in answers.items():
        option = options().get(name)
        if option is None or option.file_key is None or value is None:
            continue
        place = content if option.section.file_key is None else content.setdefault(option.section.file_key, {})
        place[_key(option)] = _plain(value)
    if content.get("dynamo_config", {}).get("dynamo_backend") == "no":
        del content["dynamo_config"]
    return content


def _key(option: LaunchOption) -> str:
    """Return the key, without the prefix where files have always left it out."""
    key = option.file_key or option.name
    if option.section is Fp8Options and key != "fp8_format":
        return key.removeprefix(Fp8Options.prefix)
    return key


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return ",".join(str(entry) for entry in value)
    return _FLAGS.get(value, value) if isinstance(value, str) else value
