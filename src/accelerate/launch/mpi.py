"""MPI: start the workers by mpirun, or take the place that mpirun gave this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.launch.command import recorded_command, script_command, worker_environment
from accelerate.launch.elastic import processes_per_machine
from accelerate.launch.meeting import DEFAULT_PORT, MeetingPoint, fixed_port, on_this_machine
from accelerate.launch.plan import FILES, LaunchPlan
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

name = "MPI"

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")
_HOSTFILE = f"{FILES}/hostfile"
# Where workers of this machine leave the record of a failure; set when the run starts.
FAILURE_FOLDER = "ACCELERATE_FAILURE_FOLDER"


@dataclass(frozen=True)
class Flavour:
    """How one family of MPI spells what every family can do; `{}` takes the value."""

    marks: tuple[str, ...]
    count: str
    hostfile: str
    per_node: tuple[str, ...]
    variable: tuple[str, ...]


# Threads of a worker must not share one core, so Open MPI's binding is off.
_OPEN_MPI = Flavour(
    ("open mpi", "open-mpi", "openrte"),
    "-np",
    "--hostfile",
    ("--map-by", "ppr:{}:node", "--bind-to", "none"),
    ("-x", "{name}"),
)
_HYDRA = Flavour(
    ("intel(r) mpi", "hydra", "mpich", "mvapich"), "-n", "-f", ("-ppn", "{}"), ("-genv", "{name}", "{value}")
)
_FLAVOURS = (_OPEN_MPI, _HYDRA)


def accepts(config: RunConfig, site: Site) -> Choice[bool]:
    """Accept a hostfile for mpirun, and a process that mpirun has started as one of several."""
    size = _size_around(site)
    asked = int(config["num_processes"] or 1)
    if size > 1 and (asked in {1, size} or not config.is_given("num_processes")):
        return Choice(True, f"mpirun started {size} processes")
    if config["mpirun_hostfile"]:
        return Choice(True, f"mpirun_hostfile={config['mpirun_hostfile']!r}")
    return Choice(False, "no hostfile for mpirun")


def plan(config: RunConfig, site: Site) -> LaunchPlan:
    """Write the command of mpirun, or run the script in place of a process that mpirun started."""
    size = _size_around(site)
    if size > 1:
        local = next((site.integer(variable) or 1 for variable in _LOCAL_SIZES if site.integer(variable)), size)
        note = f"mpirun started {size} processes; this is one of them, and nothing more is started here."
        notes = (note,) if 0 in map(site.integer, _RANKS) else ()
        return LaunchPlan(
            "exec", script_command(config, site), worker_environment(config, site, local), notes, launcher=name
        )
    program = site.find_program("mpirun") or site.find_program("mpiexec")
    if program is None:
        raise ConfigurationError(
            f"mpirun_hostfile={config['mpirun_hostfile']!r} ({config.origin('mpirun_hostfile')}) needs mpirun or "
            "mpiexec, and neither is on the PATH. Install Open MPI or MPICH, or leave the hostfile out."
        )
    return _mpirun(config, site, program)


def _mpirun(config: RunConfig, site: Site, program: str) -> LaunchPlan:
    processes, local = int(config["num_processes"] or 1), processes_per_machine(config)
    flavour = _flavour(site.mpi_version(program))
    path, content, hosts = _hostfile(str(config["mpirun_hostfile"]), local)
    several = int(config["num_machines"] or 1) > 1
    point = _meeting_point(config, site, hosts) if several else on_this_machine(config, site)
    values = worker_environment(config, site, local)
    values |= {"MASTER_ADDR": point.address, "MASTER_PORT": str(fixed_port(point, site))}
    argv = [program, flavour.count, str(processes), flavour.hostfile, path]
    argv += [word.replace("{}", str(local)) for word in flavour.per_node]
    if not several:
        # Where the failure of a worker is left means something on this machine alone.
        values[FAILURE_FOLDER] = f"{FILES}/failures"
    for variable, value in values.items():
        argv += [word.format(name=variable, value=value) for word in flavour.variable]
    command = (*argv, *recorded_command(config, site))
    return LaunchPlan("spawn_command", command, values, point.notes, files=content, launcher=name)


def _size_around(site: Site) -> int:
    return next((size for size in map(site.integer, _SIZES) if size), 1)


def _flavour(version: str) -> Flavour:
    for flavour in _FLAVOURS:
        if any(mark in version.lower() for mark in flavour.marks):
            return flavour
    raise ConfigurationError(
        f"`mpirun --version` says {version.strip()[:80]!r}, which is neither Open MPI nor MPICH, Intel MPI or MVAPICH, "
        "so its options are unknown. Put one of these first on the PATH, or start `mpirun ... accelerate launch` by hand."
    )


def _hostfile(given: str, slots: int) -> tuple[str, dict[str, str], list[str]]:
    """Return the path of the hostfile, the content of one that is to be written, and its hosts.

    Raises:
        ConfigurationError: If it is neither a file nor a list of hosts.
    """
    path = Path(given).expanduser()
    if path.is_file():
        lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
        return str(path), {}, [line.split()[0].split(":")[0] for line in lines if line]
    if "/" in given or given.endswith((".txt", ".hosts")) or given == "hostfile":
        raise ConfigurationError(
            f"The hostfile {given!r} does not exist. Write a file with one host a line, or name the hosts themselves: "
            "--mpirun_hostfile first-host,second-host."
        )
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    return _HOSTFILE, {"hostfile": "".join(f"{host} slots={slots}\n" for host in hosts)}, hosts


def _meeting_point(config: RunConfig, site: Site, hosts: list[str]) -> MeetingPoint:
    port = config["main_process_port"]
    address = config["main_process_ip"] or (hosts[0] if hosts else None)
    if not address:
        raise ConfigurationError(
            f"The hostfile {config['mpirun_hostfile']!r} names no host, so the processes cannot meet. "
            "Write one host a line, the first of them this machine."
        )
    return MeetingPoint(str(address), int(port) if port else DEFAULT_PORT)
