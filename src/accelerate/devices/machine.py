"""What this machine has: accelerators, its place in a Slurm job, free ports; found out without loading torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import number_in, shown
from accelerate.devices.base import DeviceBackend
from accelerate.devices.registry import AMD_NODES, APPLE, CPU, VENDORS
from accelerate.devices.xla import XLA

if TYPE_CHECKING:
    import socket

# A line of a tool's list: "GPU 0: ..." or "0,...", unlike a heading.
_LISTED = re.compile(r"(?:GPU )?\d")

# Says which TPU this is, such as "v3-8", where the system does not list its chips.
_TPU_TYPE = "TPU_ACCELERATOR_TYPE"
_TPUS_OF_TWO_CORES = ("v2-", "v3-")

_PCI_DEVICES = "sys/bus/pci/devices"
_GOOGLE = "0x1ae0"
# Of each kind of chip: the cores that are devices of their own.
_CORES_OF_CHIPS = {"0x0027": 2, "0x005e": 1, "0x0056": 1, "0x0062": 1, "0x0063": 1, "0x006f": 1, "0x0076": 1}
_DEFAULT_PORT = 29500
# Linux hands out ports from 32768 on by default, other systems from 49152 on.
_LOWEST_PORT, _HIGHEST_PORT = 20_000, 32_768
_PORT_ATTEMPTS = 20
# All processes of a machine connect at the same time.
_BACKLOG = 4096
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
# Nodes of a cluster, or processes of a node.
_MOST_COUNTED = 1_000_000


@dataclass(frozen=True)
class SlurmJob:
    """The job of Slurm that this process is part of."""

    job: str
    num_nodes: int
    num_tasks: int
    node_rank: int


@dataclass(frozen=True)
class Machine:
    """The hardware of a machine and the services around it.

    Args:
        device_type: The device type of torch; `"cpu"` where no accelerator was found.
        device_count: How many of them a process started here would see; 0 for the CPU.
        cpu_count: Processors that this process may use.
        visible_devices_variable: The variable that limits which accelerators a process sees.
    """

    device_type: str = "cpu"
    device_count: int = 0
    cpu_count: int = 1
    has_mpirun: bool = False
    slurm: SlurmJob | None = None
    visible_devices_variable: str | None = None
    label: DistributedType = DistributedType.MULTI_CPU

    @property
    def has_accelerator(self) -> bool:
        """Whether there is anything beside the CPU."""
        return self.device_count > 0

    def __str__(self) -> str:
        found = f"{self.device_count} of type {self.device_type}" if self.has_accelerator else "no accelerator"
        return f"{found} and {self.cpu_count} CPU cores"


def detect(environ: Mapping[str, str], *, root: Path = Path("/")) -> Machine:
    """Look at device files, and ask vendors' tools only where such files are missing.

    Args:
        environ: The environment variables to go by.
        root: Where the file system starts.
    """
    kind, count = _accelerator(environ, root)
    return Machine(
        device_type=kind.type,
        device_count=count,
        cpu_count=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        has_mpirun=any(shutil.which(name, path=environ.get("PATH")) for name in ("mpirun", "mpiexec")),
        slurm=_slurm(environ),
        visible_devices_variable=kind.visible_devices_variable,
        label=kind.label,
    )


def _accelerator(environ: Mapping[str, str], root: Path) -> tuple[DeviceBackend, int]:
    for kind in VENDORS:
        count = sum(tpu_cores(environ, root)) if kind is XLA else _visible(kind, _count(kind, environ, root), environ)
        if count:
            return kind, count
    # Asked of the kernel: the module `platform` takes longer to load than all of this.
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return APPLE, 1
    return CPU, 0


def _count(kind: DeviceBackend, environ: Mapping[str, str], root: Path) -> int:
    for pattern in kind.device_files:
        hits = [path for path in root.glob(pattern) if not pattern.startswith(AMD_NODES) or _computes(path)]
        if hits:
            return len(hits)
    # A tool speaks about the real machine only.
    if not kind.listing_command or root != Path("/"):
        return 0
    program = shutil.which(kind.listing_command[0], path=environ.get("PATH"))
    return _lines([program, *kind.listing_command[1:]]) if program else 0


def tpu_cores(environ: Mapping[str, str], root: Path = Path("/")) -> list[int]:
    """Return the number of cores of each TPU chip that a process started here would see.

    Args:
        environ: The environment variables to go by.
        root: Where the file system starts.
    """
    # Some chips have no device file; in a container there may be nothing but that.
    chips = list(tpu_chips(root))
    if not chips:
        cores = 2 if environ.get(_TPU_TYPE, "").lower().startswith(_TPUS_OF_TWO_CORES) else 1
        chips = [cores] * _count(XLA, environ, root)
    return chips[: _visible(XLA, len(chips), environ)]


@cache
def tpu_chips(root: Path = Path("/")) -> tuple[int, ...]:
    """Return the number of cores of each TPU chip that this machine has."""
    found = []
    for folder in sorted((root / _PCI_DEVICES).glob("*")):
        try:
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue
        if vendor == _GOOGLE and device in _CORES_OF_CHIPS:
            found.append(_CORES_OF_CHIPS[device])
    return tuple(found)


def link_variables(machine: Machine) -> dict[str, str]:
    """Return variables that processes on several accelerators of this machine need to reach each other."""
    if machine.device_type != "cuda" or machine.device_count < 2:
        return {}
    from accelerate.devices import nvidia

    return nvidia.link_variables()


def _computes(node: Path) -> bool:
    """Say whether a node of AMD's topology is a GPU: the CPU is listed too, without compute units."""
    try:
        properties = node.read_text()
    except OSError:
        return False
    counts = dict(line.split(maxsplit=1) for line in properties.splitlines() if " " in line)
    return counts.get("simd_count", "0").strip() != "0"


def _lines(command: list[str]) -> int:
    import subprocess  # slow to load, and most machines have no tool to ask

    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # no driver behind the tool
        return 0
    return sum(_LISTED.match(line) is not None for line in answer.stdout.splitlines())


def _visible(kind: DeviceBackend, count: int, environ: Mapping[str, str]) -> int:
    limit = environ.get(kind.visible_devices_variable or "")
    if limit is None or not count:
        return count
    # A negative number ends the list, as the drivers have it.
    entries: list[str] = []
    for entry in limit.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        entries.append(entry.strip())
    return min(count, len(entries))


def _slurm(environ: Mapping[str, str]) -> SlurmJob | None:
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None

    def number(*names: str, default: int) -> int:
        numbers = (number_in(environ.get(name, "")) for name in names)
        return next((found for found in numbers if found is not None), default)

    return SlurmJob(
        job,
        num_nodes=number("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1),
        num_tasks=number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1),
        node_rank=number("SLURM_NODEID", default=0),
    )


def tasks_of_nodes(counts: str) -> list[int]:
    """Read a list such as `4(x2),3`: the tasks of each node.

    Raises:
        ConfigurationError: If it counts more than any machine or cluster has.
    """
    found: list[int] = []
    for count, times in _TASKS.findall(counts):
        tasks, nodes = number_in(count, _MOST_COUNTED), number_in(times or "1", _MOST_COUNTED)
        if tasks is None or nodes is None or len(found) + nodes > _MOST_COUNTED:
            raise ConfigurationError(
                f"Slurm's list of tasks {shown(counts)} counts more of them than a cluster has, so it is broken. "
                "Set SLURM_STEP_TASKS_PER_NODE to a list such as `4(x2),3`, or unset it."
            )
        found += [tasks] * nodes
    return found


def first_host(nodes: str) -> str:
    """Return the first host of a list such as `gpu[003-005,9],login`.

    Raises:
        ConfigurationError: If the list names none.
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if match is None:
        raise ConfigurationError(
            f"Slurm's node list {nodes!r} names no host, so the processes cannot meet. "
            "Add --main_process_ip, or set MASTER_ADDR, with the first host of the job."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match.group())


def port_of_job(job: str) -> int:
    """Return a port that all processes of a job derive alike and two jobs almost never share."""
    import zlib

    return 15000 + zlib.crc32(job.encode()) % 40000


def is_port_in_use(port: int | str | None = None) -> bool:
    """Say whether something listens on a port of this machine (by default the one of torch.distributed)."""
    import socket  # here, because `--help` of a launch loads this file too

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", _DEFAULT_PORT if port is None else int(port))) == 0


def get_free_port() -> int:
    """Return a port that is free at this moment.

    It lies below those that the system hands out by itself, so that no connection of another program takes it between
    this moment and its use, and is drawn at random, so that two programs that ask at once get two.
    """
    import socket

    for _ in range(_PORT_ATTEMPTS):
        # Not by the module random: the launcher would load it for this alone, and a seed must not choose the port.
        port = _LOWEST_PORT + int.from_bytes(os.urandom(4), "big") % (_HIGHEST_PORT - _LOWEST_PORT)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def is_loopback(address: str) -> bool:
    """Return whether an address leads to this machine whichever machine it is used on."""
    return address in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", address) is not None


def listen_on_loopback(port: int = 0, address: str = "127.0.0.1") -> socket.socket:
    """Return a socket that listens on a loopback address only; port 0 takes a free one.

    Raises:
        OSError: If the port is in use, or this machine has no such address.
    """
    import socket

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Clients of `localhost` try ::1 as well as this one.
    number = "127.0.0.1" if address == "localhost" else address
    return socket.create_server((number, port), family=family, backlog=_BACKLOG)


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address of this machine."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None


def only_address() -> str | None:
    """Return an IPv4 address of the only network interface besides the loopback one, None if there are several."""
    import socket

    import psutil

    outer = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and not is_loopback(entry.address):
                outer[name] = str(entry.address)
    return next(iter(outer.values())) if len(outer) == 1 else None


def owns_address(host: str) -> bool:
    """Return whether a name or an address leads to an interface of this machine."""
    import socket

    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return any(interface_of(str(entry[4][0])) is not None for entry in found)
