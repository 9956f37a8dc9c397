"""Merge flags, file, environment and detection into the options of a launch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate.config import env
from accelerate.config.conflicts import check, falls_back_to_cpu, flags_differ
from accelerate.config.files import current_default_file
from accelerate.config.run_config import OptionSource, Origin, Resolved, RunConfig
from accelerate.config.sections.registry import LaunchOption, options

if TYPE_CHECKING:
    from accelerate.config.files import ConfigFile
    from accelerate.devices.machine import Machine

PARADIGMS = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm")
_OTHER_HARDWARE = ("multi_gpu", "tpu")
# The device type whose processes torch_xla starts.
_XLA = "xla"
# The number of a pod in an indexed job of Kubernetes.
_POD_INDEX = "JOB_COMPLETION_INDEX"
# torchrun takes any of its options from a variable PET_*, and Kubeflow sets those.
_TORCHRUN = ("nnodes", "nproc_per_node", "rdzv_endpoint", "standalone")


def resolve(namespace: argparse.Namespace, machine: Machine, *, environ: Mapping[str, str] | None = None) -> RunConfig:
    """Merge what was said, and refuse what contradicts itself.

    Args:
        namespace: What a parser with the arguments of `config.cli` returned.
        machine: The machine to merge for, as `devices.machine.detect` finds it.
        environ: Variables to go by; those of this process where it is not given.

    Raises:
        ConfigurationError: A value cannot be read, or two contradict each other or the machine.
    """
    variables = env.items() if environ is None else dict(environ)
    config = merge(namespace, machine, environ=variables)
    check(config, variables)
    on_cpu = falls_back_to_cpu(config, variables)
    config.notes += (on_cpu,) if on_cpu else ()
    return config


def merge(namespace: argparse.Namespace, machine: Machine, *, environ: Mapping[str, str]) -> RunConfig:
    """Merge what was said, the strongest last: defaults, detection, environment, file, flags.

    The arguments are those of `resolve`, which goes on to check what came out.

    Raises:
        ConfigurationError: A value cannot be read.
    """
    variables = dict(environ)
    flags = _flags(namespace)
    names = _names(namespace)
    file = _find_file(flags)
    values = {name: _merge(option, flags, names, file, variables) for name, option in options().items()}
    notes = [f"{file.path}: {note}" for note in file.notes] if file is not None else []
    if file is not None:
        notes += _apply_paradigm(values, file, flags)
    notes += [_idle_note(options()[name], values) for name in flags if _is_idle(options()[name], values)]
    if any(values[name].origin.source is not OptionSource.DEFAULT for name in _TORCHRUN):
        # Most launches do not load what reads torchrun's words.
        from accelerate.config.torchrun import translate

        notes += translate(values, machine)
    index = variables.get(_POD_INDEX, "")
    if int(values["num_machines"].value) > 1 and values["machine_rank"].origin.source is OptionSource.DEFAULT and index:
        values["machine_rank"] = _read_variable(options()["machine_rank"], _POD_INDEX, index)
    _fill(values, machine)
    return RunConfig(values, machine=machine, file=file, notes=tuple(notes))


def _flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return what the command line gave: what the parser noted, and what a program changed in the namespace since."""
    noted = getattr(namespace, "nondefault", ())
    given = {name: getattr(namespace, name) for name in options() if hasattr(namespace, name)}
    return {
        name: value
        for name, value in given.items()
        if (name in noted and value != []) or (value not in (None, []) and value != options()[name].default)
    }


def _names(namespace: argparse.Namespace) -> dict[str, str]:
    """Return the name under which each option with several of them was given.

    Raises:
        ConfigurationError: It was given under two names, with two values.
    """
    written: Mapping[str, Mapping[str, Any]] = getattr(namespace, "written", {})
    names = {}
    for option in options().values():
        given = written.get(option.name, {}) if option.knob.also else {}
        if given:
            (first, *others) = (
                Resolved(value, Origin(OptionSource.FLAG, f"--{name}")) for name, value in given.items()
            )
            for other in others:
                if other.value != first.value:
                    raise flags_differ(option.name, first, other)
            names[option.name] = list(given)[-1]
    return names


def _find_file(flags: Mapping[str, Any]) -> ConfigFile | None:
    """Read the file that was named, else the default one if there is one and the run is not on the CPU."""
    path = flags.get("config_file")
    if path is None:
        path = current_default_file()
        if flags.get("cpu") or not Path(path).is_file():
            return None
    # A launch without a file does not load what reads one.
    from accelerate.config.files import read_config_file

    return read_config_file(path)


def _merge(
    option: LaunchOption,
    flags: Mapping[str, Any],
    names: Mapping[str, str],
    file: ConfigFile | None,
    environ: Mapping[str, str],
) -> Resolved:
    if option.name in flags:
        flag = f"--{names[option.name]}" if option.name in names else option.flag or option.name
        return Resolved(_checked(option, flags[option.name]), Origin(OptionSource.FLAG, flag))
    if file is not None and option.name in file.values:
        entry = file.values[option.name]
        return Resolved(entry.value, Origin(OptionSource.FILE, f"{file.path}: {entry.key}"))
    from_variable = option.knob.decode(environ)
    if from_variable is not None:
        return Resolved(from_variable, Origin(OptionSource.ENVIRONMENT, str(option.knob.env)))
    for name in (option.name, *option.knob.also):
        variable = f"PET_{name.upper()}"
        if environ.get(variable):
            return _read_variable(option, variable, environ[variable])
    value = option.knob.fallback if option.default is None else option.default
    return Resolved(value, Origin(OptionSource.DEFAULT))


def _read_variable(option: LaunchOption, variable: str, text: str) -> Resolved:
    try:
        return Resolved(option.knob.codec.parse(text), Origin(OptionSource.ENVIRONMENT, variable))
    except ValueError as error:
        raise ConfigurationError(
            f"The environment variable {variable} is {text!r}, which is not {option.knob.codec.meaning}. Unset it or "
            "correct it."
        ) from error


def _checked(option: LaunchOption, value: Any) -> Any:
    """Read a text that a program put into the namespace; the parser has read its own already."""
    if not isinstance(value, str):
        return value
    try:
        return option.knob.codec.parse(value)
    except ValueError as error:
        raise ConfigurationError(
            f"{option.place}={value!r} is not {option.knob.codec.meaning}. Correct the value."
        ) from error


def _apply_paradigm(values: dict[str, Resolved], file: ConfigFile, flags: Mapping[str, Any]) -> list[str]:
    """Turn on what the file's kind of run stands for, unless a flag chose another kind."""
    from accelerate.config.files import kind_of

    origin = Origin(OptionSource.FILE, f"{file.path}: distributed_type")
    kind = kind_of(file.distributed_type)
    notes: list[str] = []
    chosen = [name for name in PARADIGMS if flags.get(name)]
    wanted = kind.turns_on if file.sagemaker is None else None
    if wanted is not None and not chosen:
        values[wanted] = Resolved(True, origin)
    elif wanted is not None and wanted not in chosen:
        notes.append(
            f"{file.path}: distributed_type {file.distributed_type} is not used, because --{chosen[0]} was given."
        )
    other_hardware = [name for name in chosen if name in _OTHER_HARDWARE]
    if other_hardware and values["cpu"].origin.source is OptionSource.FILE:
        values["cpu"] = Resolved(False, Origin(OptionSource.FLAG, f"--{other_hardware[0]}"))
    if "use_parallelism_config" not in flags and file.data.get("parallelism_config"):
        values["use_parallelism_config"] = Resolved(True, Origin(OptionSource.FILE, f"{file.path}: parallelism_config"))
    said = values["num_processes"]
    if not chosen and kind.num_processes is not None and (said.value is None or _is_left_over(values, flags)):
        values["num_processes"] = Resolved(kind.num_processes, origin)
        if said.value is not None:
            notes.append(
                f"{file.path}: num_processes {said.value} is not used, because distributed_type "
                f"{file.distributed_type} is one process. Add --num_processes {said.value} for more."
            )
    return notes


def _is_left_over(values: Mapping[str, Resolved], flags: Mapping[str, Any]) -> bool:
    """Say whether the number of processes in a file for one process is a remainder that nothing else asks for."""
    said, shared = values["num_processes"], values["use_parallelism_config"].value or "nproc_per_node" in flags
    alone = int(values["num_machines"].value) == 1 and not shared
    return alone and said.origin.source is OptionSource.FILE and int(said.value) > 1


def _is_idle(option: LaunchOption, values: Mapping[str, Resolved]) -> bool:
    """Say whether an option that was typed changes nothing in this run."""
    switch = option.section.switch if option.knob.engine_only else None
    return bool(option.knob.idle) and not (switch and values[switch].value)


def _idle_note(option: LaunchOption, values: Mapping[str, Resolved]) -> str:
    return f"{option.place} changes nothing{option.knob.idle.format(values[option.name].value)}"


def _fill(values: dict[str, Resolved], machine: Machine) -> None:
    """Fill in what nobody said from what the machine has."""
    if machine.device_type == _XLA and not any(values[name].value for name in PARADIGMS):
        values["tpu"] = Resolved(True, Origin(OptionSource.DETECTED, f"{machine.device_count} of type {_XLA}"))
    if values["tpu"].value:
        if values["num_processes"].value is None:
            reason = "a process for each device, or one for all (SPMD)"
            values["num_processes"] = Resolved(None, Origin(OptionSource.DETECTED, reason))
        return
    on_cpu = bool(values["cpu"].value) or not machine.has_accelerator
    chosen = values["gpu_ids"].value or "all"
    listed = machine.device_count if chosen == "all" else len([entry for entry in chosen.split(",") if entry.strip()])
    local = 1 if on_cpu else listed
    if values["num_processes"].value is None:
        total = local * max(1, int(values["num_machines"].value))
        reason = "one process on the CPU" if on_cpu else f"{local} of type {machine.device_type} on each machine"
        values["num_processes"] = Resolved(total, Origin(OptionSource.DETECTED, reason))
    several = int(values["num_processes"].value) > 1
    if several and not on_cpu and not any(values[name].value for name in PARADIGMS):
        reason = f"{machine.device_count} of type {machine.device_type}"
        values["multi_gpu"] = Resolved(True, Origin(OptionSource.DETECTED, reason))
