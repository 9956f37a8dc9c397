"""TPUs and other XLA devices: one process that drives all, a process for each, or a pod that is reached through gcloud."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate._base.untrusted import number_in, shown
from accelerate.config import conflicts
from accelerate.config.run_config import OptionSource
from accelerate.config.sections.compute import DynamoOptions, ParallelismOptions
from accelerate.config.sections.launch import ParadigmOptions, ResourceOptions, RunOptions, TpuOptions
from accelerate.config.sections.registry import LaunchOption, options
from accelerate.devices.xla import PJRT_DEVICE, USE_SPMD, XLA, asked_kind, uses_spmd
from accelerate.launch.entry_point import WHOLE_SCRIPT, choose_entry_point
from accelerate.launch.host import Host, check_machine
from accelerate.launch.plan import (
    FAILURE_FOLDER,
    FILES,
    WORKER,
    Launcher,
    LaunchPlan,
    script_command,
    script_kind,
    script_words,
    worker_environment,
)

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

_TPU, _CPU = "TPU", "CPU"
_CPU_DEVICES = "CPU_NUM_DEVICES"
_IN_POD = "ACCELERATE_IN_TPU_POD"
_ZONE_OF_GCLOUD = "CLOUDSDK_COMPUTE_ZONE"
# What the machines of a pod are told: the options of these sections, and two more.
_SECTIONS_OF_HOSTS = (RunOptions, ResourceOptions, DynamoOptions, ParadigmOptions, TpuOptions, ParallelismOptions)
_OPTIONS_OF_HOSTS = ("auto_resume", "preemption_grace")
# Those that speak about the launch from here.
_OPTIONS_OF_THE_POD = ("config_file", "num_processes", "num_machines", "tpu_cluster", "tpu_use_sudo", "vm", "env")
_OWN_VARIABLES = ("ACCELERATE_", "PARALLELISM_CONFIG_")


def _accepts(config: RunConfig, host: Host) -> Choice[bool]:
    asked = bool(config["tpu"])
    return Choice(asked, f"tpu=True ({config.origin('tpu')})" if asked else "no TPU was asked for")


def _plan(config: RunConfig, host: Host) -> LaunchPlan:
    conflicts.check_tpu(config)
    if config["tpu_cluster"]:
        return _plan_pod(config, host)
    _check_package(config, host)
    values = worker_environment(config, host, 1)
    if config["mixed_precision"] == "bf16" and config["downcast_bf16"]:
        # Without it, XLA_USE_BF16 is not set: that stores weights in 16 bits, and autocast keeps them in 32.
        values["XLA_DOWNCAST_BF16"] = "1"
    around = {**host.environment, **values}
    kind = _kind(config, host, around)
    if not around.get(PJRT_DEVICE):
        values[PJRT_DEVICE] = kind  # torch_xla would choose by itself, with a warning
    spmd = _runs_as_one(config, around)
    if not spmd.value:
        return _plan_processes(config, host, values, kind)
    return _plan_spmd(config, host, values, spmd.reason)


def _check_package(config: RunConfig, host: Host) -> None:
    if host.python == sys.executable and not host.has_package("torch_xla"):
        raise ConfigurationError(
            f"tpu=True ({config.origin('tpu')}) needs the package torch_xla, which is not installed. Install it with "
            "`pip install torch_xla`, or add --cpu to run on the CPU."
        )


def _kind(config: RunConfig, host: Host, around: Mapping[str, str]) -> str:
    """Return what torch_xla computes on.

    Raises:
        ConfigurationError: Neither a TPU nor a variable says it, or the variable names nothing that is known.
    """
    kind = asked_kind(around) or (_TPU if host.tpu_cores(around) else "")
    if not kind:
        raise ConfigurationError(
            f"tpu=True ({config.origin('tpu')}), but this machine has no TPU ({config.machine}), and {PJRT_DEVICE} names "
            f"no other XLA device. Run it where the TPU is, or set {PJRT_DEVICE}={_CPU} for a trial run on the CPU."
        )
    return kind


# --- one process for all devices --------------------------------------------------------------------------------------


def _runs_as_one(config: RunConfig, around: Mapping[str, str]) -> Choice[bool]:
    """Say whether one process drives all devices of a machine together, and why."""
    if uses_spmd(around):
        return Choice(True, f"{USE_SPMD}={around[USE_SPMD]}")
    asked = bool(config["use_parallelism_config"])
    return Choice(asked, f"use_parallelism_config=True ({config.origin('use_parallelism_config')})" if asked else "")


def _plan_spmd(config: RunConfig, host: Host, values: dict[str, str], reason: str) -> LaunchPlan:
    values[USE_SPMD] = "1"
    note = f"One process drives all XLA devices of this machine together (SPMD), because of {reason}."
    notes = (note, *_unused_processes(config, reason))
    if config["no_python"]:
        return LaunchPlan("exec", script_command(config, host), values, notes)
    entry = choose_entry_point(config)
    if entry.value == WHOLE_SCRIPT:
        return LaunchPlan("exec", script_command(config, host), values, notes)
    return LaunchPlan("exec", _worker(config, host, "spmd", entry), values, (*notes, _calls(entry)))


def _unused_processes(config: RunConfig, reason: str) -> tuple[str, ...]:
    """Return a note where a file asks for several processes.

    Raises:
        ConfigurationError: They were asked for on the command line.
    """
    count = config["num_processes"]
    if count is None or count == 1:
        return ()
    if config.is_typed("num_processes"):
        raise ConfigurationError(
            f"num_processes={count} ({config.origin('num_processes')}) together with {reason}, by which one process drives "
            f"all XLA devices of a machine. Leave --num_processes out, or unset {USE_SPMD} and leave "
            "--use_parallelism_config out for a process on each device."
        )
    return (f"num_processes={count} ({config.origin('num_processes')}) is not used: one process drives all devices.",)


# --- a process for each device ----------------------------------------------------------------------------------------


def _plan_processes(config: RunConfig, host: Host, values: dict[str, str], kind: str) -> LaunchPlan:
    if config["no_python"]:
        raise ConfigurationError(
            f"--no_python was given with XLA devices, where {config['training_script']!r} is run as Python in a process "
            f"for each. Leave --no_python out, or set {USE_SPMD}=1 to start one process that drives all devices."
        )
    count = _process_count(config, host, kind, {**host.environment, **values})
    entry = choose_entry_point(config)
    notes = () if entry.value == WHOLE_SCRIPT else (_calls(entry),)
    command = _worker(config, host, count, entry)
    if count == "1":
        return LaunchPlan("exec", command, values, notes)
    values[FAILURE_FOLDER] = f"{FILES}/failures"
    return LaunchPlan("spawn_command", command, values, notes)


def _worker(config: RunConfig, host: Host, processes: str, entry: Choice[str]) -> tuple[str, ...]:
    return (host.python, str(WORKER), "xla", processes, entry.value, script_kind(config), *script_words(config))


def _calls(entry: Choice[str]) -> str:
    return f"Each process imports the script and calls its {entry.value}(), because {entry.reason}."


def _process_count(config: RunConfig, host: Host, kind: str, around: Mapping[str, str]) -> str:
    """Return `1` or `all`; torch_xla starts no other number.

    Raises:
        ConfigurationError: Another number was asked for, or the devices cannot have a process each.
    """
    in_pod = bool(around.get(_IN_POD))
    # A file may speak about the whole pod.
    asked = None if in_pod and not config.is_typed("num_processes") else config["num_processes"]
    if asked == 1:
        return "1"
    cores = device_cores(host, kind, around)
    if cores is None:
        if asked is None:
            return "all"
        raise ConfigurationError(
            f"num_processes={asked} ({config.origin('num_processes')}), and how many devices {PJRT_DEVICE}={kind} has is "
            "known to its plugin alone. Leave --num_processes out for a process on each device, or write 1."
        )
    _check_cores(config, kind, cores)
    devices = sum(cores)
    if asked not in (None, devices):
        raise _wrong_number(config, kind, devices)
    # Alone in the words of torch_xla is a TPU of one chip, which a machine of a pod is not.
    if devices == 1 and not in_pod:
        return "1"
    chips = str(XLA.visible_devices_variable)
    if kind == _TPU and around.get(chips):
        raise ConfigurationError(
            f"{chips}={around[chips]!r} gives every process the same chips, while torch_xla gives each its own by that "
            f"variable. Unset it for a process on each chip, write --num_processes 1, or set {USE_SPMD}=1: one process "
            "then drives these chips."
        )
    return "all"


def device_cores(host: Host, kind: str, around: Mapping[str, str]) -> list[int] | None:
    """Return, for each process that torch_xla would start, the devices it would have; None where only a plugin knows.

    Args:
        kind: What torch_xla computes on.
        around: The variables of the processes.

    Raises:
        ConfigurationError: The variable with the number of devices holds none.
    """
    if kind == _TPU:
        return host.tpu_cores(around)
    if kind != _CPU:
        return None
    text = around.get(_CPU_DEVICES) or "1"
    count = number_in(text)
    if not count:
        raise ConfigurationError(
            f"{_CPU_DEVICES}={shown(text)} is no number of devices. Write 1 or more, or unset the variable."
        )
    return [count]


def _check_cores(config: RunConfig, kind: str, cores: list[int]) -> None:
    if not cores:
        raise ConfigurationError(
            f"{PJRT_DEVICE}={kind}, but this machine lists no TPU chip ({config.machine}), so there is nothing to start a "
            f"process for. Run it where the TPU is, or set {PJRT_DEVICE}={_CPU} for a trial run on the CPU."
        )
    if max(cores) > 1:
        where = (
            f"each TPU chip of this machine has {max(cores)} cores" if kind == _TPU else f"{_CPU_DEVICES}={cores[0]}"
        )
        raise ConfigurationError(
            f"{where}, and torch_xla would drive them by threads of one process, while an Accelerator belongs to a process. "
            f"Set {USE_SPMD}=1: one process then drives all {sum(cores)} devices together. --num_processes 1 uses one."
        )


def _wrong_number(config: RunConfig, kind: str, devices: int) -> ConfigurationError:
    given = f"num_processes={config['num_processes']} ({config.origin('num_processes')})"
    if devices == 1:
        remedy = "Leave --num_processes out, or write 1"
    else:
        remedy = f"Leave --num_processes out for {devices}, or write 1"
    limit = " Processes need a device each." if config["num_processes"] > devices else ""
    return ConfigurationError(
        f"{given}, and this machine has {devices} XLA device{'s' if devices > 1 else ''} ({PJRT_DEVICE}={kind}): torch_xla "
        f"starts one process, or one for each device.{limit} {remedy}."
    )


# --- a pod ------------------------------------------------------------------------------------------------------------


def _plan_pod(config: RunConfig, host: Host) -> LaunchPlan:
    """Let gcloud run this launcher on every machine of a pod."""
    conflicts.check_tpu_pod(config)
    names = [str(name) for name in config["vm"] or (config["tpu_name"],)]
    for name in names:
        option = "vm" if config["vm"] else "tpu_name"
        check_machine(name, f"{option} ({config.origin(option)})")
    zone = ("--zone", str(config["tpu_zone"])) if config["tpu_zone"] else ()
    if not zone and not host.environment.get(_ZONE_OF_GCLOUD):
        raise ConfigurationError(
            f"tpu_cluster=True ({config.origin('tpu_cluster')}), and the zone of {', '.join(names)} was not given, without "
            f"which gcloud does not find it. Add tpu_zone to the configuration file, or set {_ZONE_OF_GCLOUD}."
        )
    if host.find_program("gcloud") is None:
        raise conflicts.no_gcloud()
    spmd = _runs_as_one(config, host.environment)
    command = _command_of_hosts(config, uses_spmd(host.environment))
    commands = {
        name: ("gcloud", "compute", "tpus", "tpu-vm", "ssh", name, *zone, "--worker", "all", "--command", command)
        for name in names
    }
    each = "one process that drives all its devices" if spmd.value else "a process for each of its devices"
    note = f"gcloud starts this launcher on every machine of {', '.join(names)}; each of them starts {each}."
    notes = (note, *_unused_on_pod(config, spmd))
    machines = commands if len(commands) > 1 else {}
    return LaunchPlan("spawn_command", commands[names[0]], {}, notes, machines=machines)


def _unused_on_pod(config: RunConfig, spmd: Choice[bool]) -> tuple[str, ...]:
    if spmd.value:
        return _unused_processes(config, spmd.reason)
    if config.is_typed("num_processes"):
        raise ConfigurationError(
            f"num_processes={config['num_processes']} ({config.origin('num_processes')}) and tpu_cluster=True "
            f"({config.origin('tpu_cluster')}): every machine of a pod starts a process for each of its devices. Leave "
            "--num_processes out."
        )
    # A file without a number of its own says 1.
    if not config.is_given("num_processes") or config["num_processes"] == 1:
        return ()
    return (f"num_processes={config['num_processes']} ({config.origin('num_processes')}) is not used.",)


def _command_of_hosts(config: RunConfig, with_spmd: bool) -> str:
    """Return what the shell of each machine runs: this launcher in the same folder, with the options that matter there."""
    variables = [f"{_IN_POD}=1", *([f"{USE_SPMD}=1"] if with_spmd else []), *map(str, config["env"] or ())]
    # Programs that the user has installed are not on the path that sudo sets.
    front = ["sudo", "env", '"PATH=$PATH"'] if config["tpu_use_sudo"] else ["env"]
    words = ["accelerate", "launch", "--tpu", "--no_tpu_cluster", *_options_of_hosts(config), *script_words(config)]
    folder = shlex.quote(str(Path.cwd()))
    return f"cd {folder} && {' '.join(front)} {shlex.join([*variables, *words])}"


def _options_of_hosts(config: RunConfig) -> list[str]:
    words: list[str] = []
    for name, option in options().items():
        if option.flag is None or not _matters_to_hosts(config, option):
            continue
        value = config[name]
        if option.knob.shape == "switch":
            words += [option.flag] if value else []
        elif value is not None:
            words.append(f"{option.flag}={option.knob.codec.format(value)}")
    return words


def _matters_to_hosts(config: RunConfig, option: LaunchOption) -> bool:
    if option.name in _OPTIONS_OF_THE_POD:
        return False
    if option.section not in _SECTIONS_OF_HOSTS and option.name not in _OPTIONS_OF_HOSTS:
        return False
    if config.resolved(option.name).origin.source is OptionSource.ENVIRONMENT:
        # Others, such as the number of threads, may be about this machine.
        return str(option.knob.env).startswith(_OWN_VARIABLES)
    return config.is_given(option.name)


TPU = Launcher("TPU", _accepts, _plan)
