"""The machine that a launch starts from: its variables, its programs, and the address at which processes rendezvous."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accelerate.config import conflicts, env
from accelerate.devices.machine import Machine, get_free_port, is_port_in_use, link_variables

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Host:
    """The surroundings of a launch. What costs time to find out is a function that is called where it is needed.

    Args:
        environment: The variables of the launcher's process.
        arguments: The launcher's own arguments as they were typed, for a plan that starts the launcher elsewhere.
        find_program: Returns the path of a program, or None.
        mpi_version: Returns what `mpirun --version` prints.
        address_towards: Returns the address of this machine on its way to another one.
        interface_of: Returns the network interface that has an address of this machine.
        link_variables: Returns what processes on several accelerators of this machine need to reach each other.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    python: str = "python"
    physical_cores: Callable[[], int] = lambda: 1
    port_in_use: Callable[[int], bool] = lambda port: False
    free_port: Callable[[], int] = lambda: 29501
    find_program: Callable[[str], str | None] = lambda name: name
    mpi_version: Callable[[str], str] = lambda program: "Open MPI"
    address_towards: Callable[[str], str | None] = lambda host: None
    interface_of: Callable[[str], str | None] = lambda address: None
    link_variables: Callable[[Machine], Mapping[str, str]] = lambda machine: {}

    def integer(self, name: str) -> int | None:
        """Return a variable as a number, None where it is not set or not one."""
        text = self.environment.get(name, "")
        return int(text) if text.isdecimal() else None


def this_host(arguments: tuple[str, ...] = ()) -> Host:
    """Return the surroundings of this process."""
    return Host(
        environment=env.items(),
        arguments=arguments,
        python=sys.executable,
        physical_cores=_physical_cores,
        port_in_use=is_port_in_use,
        free_port=get_free_port,
        find_program=shutil.which,
        mpi_version=_mpi_version,
        address_towards=_address_towards,
        interface_of=_interface_of,
        link_variables=link_variables,
    )


def _physical_cores() -> int:
    import os

    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def _mpi_version(program: str) -> str:
    import subprocess

    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout + answer.stderr


def _interface_of(address: str) -> str | None:
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None


def _address_towards(host: str) -> str | None:
    """Ask the routing table, by a datagram socket that sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


@dataclass(frozen=True)
class Rendezvous:
    """The address and port of the first process, and notes for the user; a port of None is picked at the start."""

    address: str
    port: int | None
    notes: tuple[str, ...] = ()

    def fixed_port(self, host: Host) -> int:
        """Return the port, a free one where it is to be picked."""
        return host.free_port() if self.port is None else self.port


def local_rendezvous(config: RunConfig, host: Host) -> Rendezvous:
    """Choose the port for processes that are all on this machine.

    Raises:
        ConfigurationError: A port was typed and something listens on it.
    """
    port = given_port(config)
    if port is None or not host.port_in_use(port):
        return Rendezvous(LOOPBACK, port)
    if config.is_typed("main_process_port"):
        raise conflicts.port_in_use(config, port)
    note = f"Port {port} ({config.origin('main_process_port')}) is in use on this machine; a free one takes its place."
    return Rendezvous(LOOPBACK, None, (note,))


def given_port(config: RunConfig) -> int | None:
    """Return the port that somebody chose, None if nobody did."""
    port = config["main_process_port"]
    return int(port) if port and config.is_given("main_process_port") else None


def rank_config(backend: str, machine_rank: int, num_machines: int, *, known: bool = True) -> dict[str, str]:
    """Return what torch's rendezvous is told of this machine's rank; `known` says whether somebody chose it."""
    if backend == "static":
        return {"rank": str(machine_rank)}
    # Without a rank the c10d backend compares host names to find out who holds the store.
    return {"is_host": str(machine_rank == 0)} if backend == "c10d" and num_machines > 1 and known else {}
