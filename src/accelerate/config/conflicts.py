"""Refuse options of a launch that contradict each other or the machine, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from accelerate._base.errors import ConfigurationError
from accelerate.config.run_config import OptionSource, RunConfig

_OTHER_HARDWARE = ("tpu", "multi_gpu")
_ENGINES = (*_OTHER_HARDWARE, "use_deepspeed", "use_fsdp", "use_megatron_lm")
# Under these the machines are found by others, and no address is needed.
_FINDERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_SHARDING_AXES = ("dp_shard", "sp")
_OWN_AXES = ("dp_replicate", "cp", "tp", "pp")

Check = Callable[[RunConfig, Mapping[str, str]], None]


def check(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Run every check.

    Raises:
        ConfigurationError: One of them fails.
    """
    for rule in _RULES:
        rule(config, environ)


def _said(config: RunConfig, name: str) -> str:
    """Name a value with its origin."""
    return f"{name}={config[name]!r} ({config.origin(name)})"


def _one_paradigm(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Let one engine have the model; the CPU goes with each of them, but not with a choice of other hardware."""
    engines = [name for name in _ENGINES if config[name]]
    other_hardware = [name for name in engines if name in _OTHER_HARDWARE]
    rivals = ["cpu", *other_hardware] if config["cpu"] and other_hardware else engines
    if len(rivals) > 1:
        raise ConfigurationError(
            f"{_said(config, rivals[0])} and {_said(config, rivals[1])} exclude each other: a run has one kind of "
            "training. Leave one of them out."
        )


def _counts(config: RunConfig, environ: Mapping[str, str]) -> None:
    for name in ("num_processes", "num_machines"):
        if config[name] is not None and config[name] < 1:
            raise ConfigurationError(
                f"{_said(config, name)} cannot work: at least one is needed. Write --{name} with a number from 1 on."
            )
    processes, machines = config["num_processes"] or 0, config["num_machines"]
    # Slurm and MPI may share processes out in their own way.
    if processes % machines and not _found_by_others(config, environ):
        raise ConfigurationError(
            f"{_said(config, 'num_processes')} is the total over all machines and cannot be shared evenly among "
            f"{_said(config, 'num_machines')}. Write --num_processes {max(1, processes // machines) * machines}, or "
            "another multiple."
        )
    if config["machine_rank"] >= machines or config["machine_rank"] < 0:
        raise ConfigurationError(
            f"{_said(config, 'machine_rank')} is not a place among {_said(config, 'num_machines')}. "
            f"Write --machine_rank with a number from 0 to {machines - 1}."
        )


def _found_by_others(config: RunConfig, environ: Mapping[str, str]) -> bool:
    slurm = config.machine.slurm
    hostfile = config["mpirun_hostfile"] or (config["use_deepspeed"] and config["deepspeed_hostfile"])
    return bool(hostfile) or (slurm is not None and slurm.num_nodes > 1) or any(environ.get(name) for name in _FINDERS)


def _address(config: RunConfig, environ: Mapping[str, str]) -> None:
    if config["num_machines"] < 2 or config["main_process_ip"] or _found_by_others(config, environ):
        return
    if config["tpu"] or (config.file is not None and config.file.sagemaker is not None):
        return
    raise ConfigurationError(
        f"{_said(config, 'num_machines')} and no address was given, so the machines cannot find each other. "
        "Add --main_process_ip with the address of the machine with rank 0."
    )


def _port(config: RunConfig, environ: Mapping[str, str]) -> None:
    port = config["main_process_port"]
    if port is not None and not 0 <= port <= 65535:
        raise ConfigurationError(
            f"{_said(config, 'main_process_port')} is no port. Write a number up to 65535, or 0 for a free one."
        )


def _several_devices(config: RunConfig, environ: Mapping[str, str]) -> None:
    # A file for several accelerators may well be used for one process; a flag that asks for several is meant.
    typed = config.resolved("multi_gpu").origin.source is OptionSource.FLAG
    if config["multi_gpu"] and typed and config["num_processes"] < 2:
        raise ConfigurationError(
            f"{_said(config, 'multi_gpu')} starts several processes, and {_said(config, 'num_processes')}. "
            "Write --num_processes 2 or more, or leave --multi_gpu out."
        )
    chosen = config["gpu_ids"]
    if not chosen or chosen == "all" or config["cpu"] or config["tpu"]:
        return
    listed = [entry for entry in chosen.split(",") if entry.strip()]
    local = config["num_processes"] // config["num_machines"]
    if len(listed) < local:
        raise ConfigurationError(
            f"{_said(config, 'gpu_ids')} names {len(listed)} accelerator(s) for {local} processes on this machine "
            f"({_said(config, 'num_processes')}). Name one for each, or write --gpu_ids all."
        )


def _hardware(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Refuse accelerators that are asked for and not there."""
    # Whoever forces a device knows more than a look at the machine.
    if config["cpu"] or config["tpu"] or environ.get("ACCELERATE_TORCH_DEVICE") or _found_by_others(config, environ):
        return
    if config.file is not None and config.file.sagemaker is not None:
        return
    asked = next((name for name in _ENGINES if config[name] and config.is_given(name)), None)
    local = config["num_processes"] // config["num_machines"]
    if asked is not None and not config.machine.has_accelerator:
        raise ConfigurationError(
            f"{_said(config, asked)} with {_said(config, 'num_processes')} needs accelerators, and this machine has "
            f"{config.machine}. Run it where they are, or add --cpu to run on the CPU."
        )
    if config.machine.has_accelerator and local > config.machine.device_count and config["gpu_ids"] == "all":
        raise ConfigurationError(
            f"{_said(config, 'num_processes')} starts {local} processes here, and this machine has {config.machine}: "
            f"two processes cannot share one. Write --num_processes {config.machine.device_count * config['num_machines']}"
            ", or add --cpu to run on the CPU."
        )


def _axes(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Ask for an engine under the axes that shard; the others need none."""
    if not config["use_parallelism_config"] or config["use_deepspeed"]:
        return
    if config["use_fsdp"] and config["fsdp_version"] == 2:
        return
    if config["use_fsdp"]:
        raise ConfigurationError(
            f"{_said(config, 'use_parallelism_config')} needs FSDP 2, and {_said(config, 'fsdp_version')}. "
            "Write --fsdp_version 2."
        )
    used = {axis for axis in (*_SHARDING_AXES, *_OWN_AXES) if config[f"parallelism_config_{axis}_size"] > 1}
    asked_for = config.resolved("use_parallelism_config").origin.source is OptionSource.FLAG
    if used & set(_SHARDING_AXES) or (asked_for and not used):
        raise ConfigurationError(
            f"{_said(config, 'use_parallelism_config')} needs an engine that shards. Add --use_fsdp --fsdp_version 2, or "
            "--use_deepspeed."
        )


def _loading(config: RunConfig, environ: Mapping[str, str]) -> None:
    if config["use_fsdp"] and config["fsdp_cpu_ram_efficient_loading"] and not config["fsdp_sync_module_states"]:
        raise ConfigurationError(
            f"{_said(config, 'fsdp_cpu_ram_efficient_loading')} lets one process read the weights, and "
            f"{_said(config, 'fsdp_sync_module_states')} keeps them from the others. Set fsdp_sync_module_states to true."
        )


_RULES: tuple[Check, ...] = (
    _one_paradigm,
    _counts,
    _address,
    _port,
    _several_devices,
    _hardware,
    _axes,
    _loading,
)
