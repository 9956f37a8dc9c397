"""What a plan depends on besides the configuration: this machine and the variables around the launcher."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from accelerate.config import env
from accelerate.devices.machine import Machine, get_free_port, is_port_in_use, link_variables


@dataclass(frozen=True)
class Site:
    """The surroundings of a launch. What costs time to find out is a function that is called where it is needed.

    Args:
        environment: The variables of the launcher's process.
        arguments: The launcher's own arguments as they were typed, for a plan that starts the launcher elsewhere.
        find_program: Where a program is, or None.
        mpi_version: What `mpirun --version` says.
        address_towards: The address of this machine on its way to another one.
        interface_of: The network interface that has an address of this machine.
        link_variables: What processes on several accelerators of this machine need to reach each other.
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


def here(arguments: tuple[str, ...] = ()) -> Site:
    """Return the surroundings of this process."""
    return Site(
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
