"""Turn what a command line says in torchrun's words into the options of a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import number_in
from accelerate.config import conflicts
from accelerate.config.run_config import OptionSource, Origin, Resolved

if TYPE_CHECKING:
    from accelerate.devices.machine import Machine

_ADDRESS = ("rdzv_endpoint", "main_process_ip", "main_process_port")


def translate(values: dict[str, Resolved], machine: Machine) -> list[str]:
    """Give the options of a launch the values that `nnodes`, `rdzv_endpoint`, `standalone` and `nproc_per_node` stand for.

    Returns:
        Notes on what is not used.

    Raises:
        ConfigurationError: Two options say different things, or devices are counted that are not there.
    """
    notes: list[str] = []
    if values["nnodes"].value is not None:
        least, _, most = str(values["nnodes"].value).partition(":")
        _say(values, "num_machines", int(most or least), "nnodes")
        if most and most != least:
            _say(values, "min_machines", int(least), "nnodes")
    if values["standalone"].value:
        notes += _stand_alone(values)
    elif values["rdzv_endpoint"].value:
        host, port = _endpoint(str(values["rdzv_endpoint"].value))
        _say(values, "main_process_ip", host, "rdzv_endpoint")
        if port is not None:
            _say(values, "main_process_port", port, "rdzv_endpoint")
    if values["nproc_per_node"].value is not None:
        _count(values, machine)
    return notes


def _say(values: dict[str, Resolved], name: str, value: Any, by: str, how: str = "") -> None:
    """Set an option from a torchrun option; a flag with a different value contradicts it, and overrides a variable."""
    origin = Origin(OptionSource.FLAG, f"--{by}{how}")
    if values[by].origin.source is OptionSource.ENVIRONMENT:
        origin = Origin(OptionSource.ENVIRONMENT, f"{values[by].origin.detail}{how}")
        if values[name].origin.source is OptionSource.FLAG:
            return
    if values[name].origin.source is OptionSource.FLAG and values[name].value != value:
        raise conflicts.flags_differ(name, values[name], Resolved(value, origin))
    values[name] = Resolved(value, origin)


def _stand_alone(values: dict[str, Resolved]) -> list[str]:
    """Let this machine be the only one, as torchrun does: addresses that were given as well are not used."""
    # A range that begins with one machine is content with this one.
    if values["min_machines"].value == 1:
        for name in ("num_machines", "min_machines"):
            values[name] = Resolved(None, Origin(OptionSource.DEFAULT))
    _say(values, "num_machines", 1, "standalone")
    typed = [name for name in _ADDRESS if values[name].origin.source is OptionSource.FLAG and values[name].value]
    meeting = {"machine_rank": 0, "main_process_ip": None, "main_process_port": None, "rdzv_backend": "c10d"}
    for name, value in meeting.items():
        values[name] = Resolved(value, Origin(OptionSource.FLAG, "--standalone"))
    return [f"--{name} is not used, because --standalone was given." for name in typed]


def _endpoint(text: str) -> tuple[str, int | None]:
    """Split `host`, `host:port`, `[::1]` or `[::1]:port`."""
    host, colon, port = text.rpartition(":")
    if not colon or "]" in port or (":" in host and not host.endswith("]")):
        host, port = text, ""
    number = number_in(port) if port else None
    if port and number is None:
        raise ConfigurationError(
            f"--rdzv_endpoint={text!r} is no address. Write `host:port`, or `[::1]:port` for an address with colons."
        )
    return host.strip("[]"), number


def _count(values: dict[str, Resolved], machine: Machine) -> None:
    """Count the processes of all machines from those of one."""
    word = str(values["nproc_per_node"].value)
    if word == "auto":
        word = "gpu" if machine.has_accelerator and not values["cpu"].value else "cpu"
    if (number := number_in(word)) is not None:
        local = number
    elif word == "cpu":
        local = machine.cpu_count
        if not values["cpu"].value and machine.has_accelerator:
            _say(values, "cpu", True, "nproc_per_node", " cpu")
    elif machine.has_accelerator and word in ("gpu", machine.device_type):
        chosen = str(values["gpu_ids"].value or "all")
        local = (
            machine.device_count if chosen == "all" else len([entry for entry in chosen.split(",") if entry.strip()])
        )
    else:
        raise ConfigurationError(
            f"--nproc_per_node={word!r} counts accelerators, and this machine has {machine}. Write `auto`, `cpu` or a "
            "number."
        )
    machines = values["num_machines"]
    # Under Slurm the nodes of the job are the machines, unless somebody says otherwise.
    nodes = machine.slurm.num_nodes if machine.slurm and machines.origin.source is OptionSource.DEFAULT else 0
    total = max(1, nodes or int(machines.value or 1))
    each = f" {local} on each of {total} machines" if total > 1 else f" {local}"
    _say(values, "num_processes", local * total, "nproc_per_node", each)
