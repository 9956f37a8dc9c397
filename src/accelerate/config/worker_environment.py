"""The variables by which workers learn the options of a launch."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate.config.run_config import HIDDEN, RunConfig, Source
from accelerate.config.sections.deepspeed import DeepSpeedOptions
from accelerate.config.sections.launch import LaunchOption, options

# The libraries of Intel's threads, where the CPU does the work: threads stay on their cores and do not spin.
_CPU_THREADS = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}


def encode(config: RunConfig) -> dict[str, str]:
    """Return the variables of a run; each option's are those of its declaration."""
    variables: dict[str, str] = {}
    for option in options().values():
        if _reaches_worker(option, config):
            variables |= option.knob.encode(config[option.name])
    return {**variables, **_visible_devices(config), **_cpu(config), **_deepspeed(config), **_sagemaker(config)}


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables in a form that may be shown."""
    secret = {option.knob.env for option in options().values() if option.knob.secret}
    return {name: HIDDEN if name in secret else value for name, value in variables.items()}


def _reaches_worker(option: LaunchOption, config: RunConfig) -> bool:
    """Say whether workers are told: always what somebody chose, and the defaults of what is in use."""
    if option.knob.secret and config.resolved(option.name).origin.source is Source.ENVIRONMENT:
        return False  # workers inherit it, and it stays out of what is written and shown
    if config.is_given(option.name):
        return True
    on = option.section.switch is None or bool(config[option.section.switch])
    return on and (option.knob.only_if is None or option.knob.only_if(config))


def _visible_devices(config: RunConfig) -> dict[str, str]:
    variable, chosen = config.machine.visible_devices_variable, config["gpu_ids"]
    return {variable: chosen} if variable and chosen and chosen != "all" else {}


def _cpu(config: RunConfig) -> dict[str, str]:
    return dict(_CPU_THREADS) if config["cpu"] else {}


def _deepspeed(config: RunConfig) -> dict[str, str]:
    """Name the options that the file gave: DeepSpeed's own file must not give them a second time."""
    if not config["use_deepspeed"]:
        return {}
    given = [name for name, option in options().items() if option.section is DeepSpeedOptions]
    fields = [name for name in (*given, "mixed_precision") if config.file is not None and name in config.file.values]
    return {"ACCELERATE_CONFIG_DS_FIELDS": ",".join(fields)}


def _sagemaker(config: RunConfig) -> dict[str, str]:
    job = config.file.sagemaker if config.file is not None else None
    if job is None:
        return {}
    return {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": str(job["distributed_type"]),
    }
