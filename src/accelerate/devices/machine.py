"""What this machine has, found out without loading torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate._base.enums import DistributedType
from accelerate.devices.hardware import AMD_NODES, APPLE, CPU, KNOWN, Hardware

# A line of a tool's list: "GPU 0: ..." or "0,...", unlike a heading.
_LISTED = re.compile(r"(?:GPU )?\d")


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
        visible_devices_variable=kind.variable,
        label=kind.label,
    )


def _accelerator(environ: Mapping[str, str], root: Path) -> tuple[Hardware, int]:
    for kind in KNOWN:
        count = _visible(kind, _count(kind, environ, root), environ)
        if count:
            return kind, count
    # Asked of the kernel: the module `platform` takes longer to load than all of this.
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return APPLE, 1
    return CPU, 0


def _count(kind: Hardware, environ: Mapping[str, str], root: Path) -> int:
    for pattern in kind.files:
        hits = [path for path in root.glob(pattern) if not pattern.startswith(AMD_NODES) or _computes(path)]
        if hits:
            return len(hits)
    # A tool speaks about the real machine only.
    if not kind.tool or root != Path("/"):
        return 0
    program = shutil.which(kind.tool[0], path=environ.get("PATH"))
    return _lines([program, *kind.tool[1:]]) if program else 0


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


def _visible(kind: Hardware, count: int, environ: Mapping[str, str]) -> int:
    limit = environ.get(kind.variable) if kind.variable else None
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
        texts = (environ.get(name, "") for name in names)
        return next((int(text) for text in texts if text.isdecimal()), default)

    return SlurmJob(
        job,
        num_nodes=number("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1),
        num_tasks=number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1),
        node_rank=number("SLURM_NODEID", default=0),
    )
