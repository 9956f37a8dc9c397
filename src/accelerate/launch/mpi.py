"""MPI: start the workers by mpirun, or run the script in a process that mpirun started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate._base.untrusted import read_limited, shown
from accelerate.config import cluster_conflicts, conflicts
from accelerate.launch.elastic import processes_per_machine
from accelerate.launch.host import (
    DEFAULT_PORT,
    MOST_OF_HOSTFILE,
    Host,
    Rendezvous,
    check_machine,
    local_rendezvous,
    main_address,
)
from accelerate.launch.plan import (
    FAILURE_FOLDER,
    FILES,
    Launcher,
    LaunchPlan,
    recorded_command,
    script_command,
    worker_environment,
)

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class MpiFamily:
    """How one family of MPI spells what every family can do.

    Args:
        marks: Words in `mpirun --version` by which the family is known.
        per_node: Sets the processes of each machine; `{}` takes their number.
        by_slot: Fills the slots of one machine after the other.
        host_line: The line of a hostfile; `{}` takes the name, then the number of slots.
        variable: Hands a variable on; `{name}` and `{value}` take it.
    """

    marks: tuple[str, ...]
    count: str
    hostfile: str
    per_node: tuple[str, ...]
    by_slot: tuple[str, ...]
    host_line: str
    variable: tuple[str, ...]


OPEN_MPI = MpiFamily(
    marks=("open mpi", "open-mpi", "openrte"),
    count="-np",
    hostfile="--hostfile",
    # Threads of a worker must not share one core, so Open MPI's binding is off.
    per_node=("--map-by", "ppr:{}:node", "--bind-to", "none"),
    by_slot=("--map-by", "slot", "--bind-to", "none"),
    host_line="{} slots={}",
    variable=("-x", "{name}"),
)
HYDRA = MpiFamily(
    marks=("intel(r) mpi", "hydra", "mpich", "mvapich"),
    count="-n",
    hostfile="-f",
    per_node=("-ppn", "{}"),
    by_slot=(),
    host_line="{}:{}",
    variable=("-genv", "{name}", "{value}"),
)


def _world_size(host: Host) -> int:
    """Return how many processes the mpirun around this one started, 1 without one."""
    return next((size for size in map(host.integer, conflicts.MPI_WORLD_SIZES) if size), 1)


def _accepts(config: RunConfig, host: Host) -> Choice[bool]:
    """Accept a hostfile for mpirun, and a process that mpirun has started as one of several."""
    size = _world_size(host)
    asked = int(config["num_processes"] or 1)
    if size > 1 and (asked in {1, size} or not config.is_given("num_processes")):
        return Choice(True, f"mpirun started {size} processes")
    if config["mpirun_hostfile"]:
        return Choice(True, f"mpirun_hostfile={config['mpirun_hostfile']!r}")
    return Choice(False, "no hostfile for mpirun")


def _plan(config: RunConfig, host: Host) -> LaunchPlan:
    size = _world_size(host)
    if size == 1:
        return _plan_mpirun(config, host)
    local = next((count for count in map(host.integer, _LOCAL_SIZES) if count), size)
    note = f"mpirun started {size} processes; this is one of them, and nothing more is started here."
    notes = (note,) if 0 in map(host.integer, _RANKS) else ()
    return LaunchPlan("exec", script_command(config, host), worker_environment(config, host, local), notes)


def _plan_mpirun(config: RunConfig, host: Host) -> LaunchPlan:
    program = host.find_program("mpirun") or host.find_program("mpiexec")
    if program is None:
        raise cluster_conflicts.no_mpirun(config)
    local = processes_per_machine(config)
    family = mpi_family(host, program)
    path, files, hosts = _hostfile(str(config["mpirun_hostfile"]), local)
    several = int(config["num_machines"] or 1) > 1
    if several:
        address = main_address(config) or (hosts[0] if hosts else None)
        if not address:
            raise cluster_conflicts.empty_hostfile(config)
        rendezvous = Rendezvous(address, int(config["main_process_port"] or DEFAULT_PORT))
    else:
        rendezvous = local_rendezvous(config, host)
    values = worker_environment(config, host, local, here=not several)
    values |= {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.fixed_port(host))}
    if not several:
        # A folder for records means something on this machine alone.
        values[FAILURE_FOLDER] = f"{FILES}/failures"
    placement = tuple(word.replace("{}", str(local)) for word in family.per_node)
    argv = mpirun_command(program, family, int(config["num_processes"] or 1), path, placement, values)
    command = (*argv, *recorded_command(config, host))
    return LaunchPlan("spawn_command", command, values, rendezvous.notes, files=files)


def mpi_family(host: Host, program: str) -> MpiFamily:
    """Return the family of an mpirun.

    Raises:
        ConfigurationError: It is of none that is known.
    """
    version = host.mpi_version(program)
    for family in (OPEN_MPI, HYDRA):
        if any(mark in version.lower() for mark in family.marks):
            return family
    raise cluster_conflicts.unknown_mpi(version)


def mpirun_command(
    program: str, family: MpiFamily, count: int, hostfile: str, placement: tuple[str, ...], values: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the command up to the program that every process runs.

    Args:
        placement: The words that say how many processes a machine gets.
        values: The variables that are handed on.
    """
    argv = [program, family.count, str(count), family.hostfile, hostfile, *placement]
    for variable, value in values.items():
        argv += [word.format(name=variable, value=value) for word in family.variable]
    return tuple(argv)


def _hostfile(given: str, slots: int) -> tuple[str, dict[str, str], list[str]]:
    """Return the path of the hostfile, the content of one that is to be written, and its hosts.

    Raises:
        ConfigurationError: It is neither a file nor a list of hosts, or names what is no host.
    """
    try:
        path = Path(given).expanduser()
        text = read_limited(path, MOST_OF_HOSTFILE).decode() if path.is_file() else None
    except ConfigurationError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # the last two for a home of nobody, and for what is no text
        raise cluster_conflicts.unreadable_hostfile(given, error) from error
    if text is not None:
        return str(path), {}, _read_hosts(path, text)
    if "/" in given or given.endswith((".txt", ".hosts")) or given == "hostfile":
        raise cluster_conflicts.missing_hostfile(given)
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    for host in hosts:
        check_machine(host, f"mpirun_hostfile={shown(given)}")
    return f"{FILES}/hostfile", {"hostfile": "".join(f"{host} slots={slots}\n" for host in hosts)}, hosts


def _read_hosts(path: Path, text: str) -> list[str]:
    """Return the hosts of a file that mpirun reads itself, and takes to ssh."""
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if words and not words[0].startswith("#"):
            check_machine(words[0], f"{path}:{number}")
            hosts.append(words[0].split(":")[0])
    return hosts


MPI = Launcher("MPI", _accepts, _plan)
