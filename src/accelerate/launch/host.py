"""The machine that a launch starts from: its variables, its programs, and the address at which processes rendezvous."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import is_host, number_in, shown
from accelerate.config import conflicts, env
from accelerate.devices.machine import (
    Machine,
    get_free_port,
    interface_of,
    is_loopback,
    is_port_in_use,
    link_variables,
    only_address,
    tpu_cores,
)

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
# Belongs to no network (RFC 5737), so the way there is the default route.
_ANOTHER_NETWORK = "203.0.113.1"
MOST_OF_HOSTFILE = 1_000_000
"""The most bytes of a file that lists machines: more than any cluster needs."""
NAMES_OF_MACHINES = "Those have letters, digits and any of `_ . : -`, and no `-` in front."


class Host:
    """The surroundings of a launch; what costs time to find out is asked for where it is needed.

    Args:
        environment: The variables of the launcher's process.
        arguments: The launcher's own arguments as they were typed, for a plan that starts the launcher elsewhere.
    """

    python = sys.executable

    def __init__(self, environment: Mapping[str, str] | None = None, arguments: tuple[str, ...] = ()) -> None:
        self.environment = env.items() if environment is None else environment
        self.arguments = arguments

    def integer(self, name: str) -> int | None:
        """Return a variable as a number, None where it is not set or not one."""
        return number_in(self.environment.get(name, ""))

    def find_program(self, name: str) -> str | None:
        """Return the path of a program, None where it is not on the PATH."""
        return shutil.which(name)

    def has_package(self, name: str) -> bool:
        """Say whether this interpreter can import a package, without doing so."""
        from importlib.util import find_spec

        return find_spec(name) is not None

    def tpu_cores(self, environment: Mapping[str, str]) -> list[int]:
        """Return the cores of each TPU chip that a process with these variables would see."""
        return tpu_cores(environment)

    def port_in_use(self, port: int) -> bool:
        """Say whether something listens on a port of this machine."""
        return is_port_in_use(port)

    def free_port(self) -> int:
        """Return a port that is free at this moment."""
        return get_free_port()

    def link_variables(self, machine: Machine) -> Mapping[str, str]:
        """Return what processes on several accelerators of this machine need to reach each other."""
        return link_variables(machine)

    def physical_cores(self) -> int:
        """Return how many cores this process may use, without their second threads."""
        import os

        import psutil

        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))

    def mpi_version(self, program: str) -> str:
        """Return what `mpirun --version` prints, nothing where it cannot be run."""
        import subprocess

        try:
            answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return answer.stdout + answer.stderr

    def address_towards(self, host: str) -> str | None:
        """Return the address of this machine on its way to another one, by a datagram socket that sends nothing."""
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError):  # a name such as `10.0..1` cannot even be encoded
            return None

    def is_own_name(self, host: str) -> bool:
        """Return whether a name leads to a loopback address here, as a machine's own name often does (127.0.1.1)."""
        return not is_loopback(host) and is_loopback(self.address_towards(host) or "")

    def outer_address(self, host: str) -> str | None:
        """Return the address at which machines that meet at `host` reach this one, None where it cannot be found out."""
        if self.is_own_name(host):
            return self.address_towards(_ANOTHER_NETWORK) or only_address()
        return self.address_towards(host)

    def interface_of(self, address: str) -> str | None:
        """Return the network interface that has an address of this machine."""
        return interface_of(address)


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


def main_address(config: RunConfig) -> str | None:
    """Return the name or address of the first machine, None if nobody gave one.

    Raises:
        ConfigurationError: It is neither, and programs and shells of other machines would read it.
    """
    if not config["main_process_ip"]:
        return None
    address = str(config["main_process_ip"])
    if not is_host(address):
        raise ConfigurationError(
            f"main_process_ip={shown(address)} ({config.origin('main_process_ip')}) is neither a name nor an address of a "
            f"machine. {NAMES_OF_MACHINES} Write --main_process_ip with one such as 10.0.0.1, fe80::1 or worker-1."
        )
    return address


def check_machine(name: str, place: str) -> None:
    """Refuse a machine that ssh would take for an option, or a shell for a command.

    Args:
        place: What names it, for the message.

    Raises:
        ConfigurationError: It is neither a name nor an address.
    """
    if not is_host(name, with_user=True):
        raise ConfigurationError(
            f"{place}: {shown(name)} is neither a name nor an address of a machine. {NAMES_OF_MACHINES} Write one such as "
            "worker-1, 10.0.0.1 or user@worker-1."
        )


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
