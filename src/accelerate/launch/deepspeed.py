"""DeepSpeed on several machines: by its own launcher with or without pdsh, by mpirun, or by srun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate._base.untrusted import first_line, read_limited
from accelerate.config import conflicts
from accelerate.launch.elastic import interface_variables
from accelerate.launch.host import DEFAULT_PORT, Host, main_address
from accelerate.launch.hostfile import HostSlots, Machines, filter_text, find_machines, hostfile_text
from accelerate.launch.mpi import HYDRA, OPEN_MPI, mpi_family, mpirun_command
from accelerate.launch.plan import (
    DEEPSPEED_DEVICE,
    FILES,
    WORKER,
    Launcher,
    LaunchPlan,
    encoded_words,
    recorded_command,
    script_kind,
    script_words,
    worker_environment,
)
from accelerate.launch.slurm import inside_step, srun_plan

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

_PDSH, _STANDARD, _WITHOUT_SSH, _SLURM = "pdsh", "standard", "nossh", "slurm"
_MPI = {"openmpi": OPEN_MPI, "mpich": HYDRA, "mvapich": HYDRA}
_INSTALLED_BY = {
    "pdsh": "Install pdsh",
    "ssh": "Install an ssh client",
    "mpirun": "Install Open MPI, MPICH or MVAPICH",
    "srun": "Load Slurm's programs",
}
_ENVIRONMENT_FILE = "deepspeed_env"
# DeepSpeed takes variables that begin so to other machines.
_TAKEN_ALONG = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
# What the shells that pdsh starts, pdsh itself and DeepSpeed's quotes leave as it is.
_PLAIN = re.compile(r"[\w@+=:,./-]+")


def _starter(config: RunConfig) -> Choice[str]:
    """Choose who starts the processes of the other machines."""
    given = config["deepspeed_multinode_launcher"]
    if given:
        return Choice(
            str(given), f"deepspeed_multinode_launcher={given!r} ({config.origin('deepspeed_multinode_launcher')})"
        )
    if config["deepspeed_hostfile"]:
        return Choice(
            _PDSH, f"deepspeed_hostfile={config['deepspeed_hostfile']!r} names the machines, pdsh reaches them"
        )
    return Choice(_STANDARD, "no hostfile names other machines, so each of them is started by hand")


def _accepts(config: RunConfig, host: Host) -> Choice[bool]:
    """Accept several machines, unless each of them is started by hand."""
    if not config["use_deepspeed"]:
        return Choice(False, "DeepSpeed was not asked for")
    machines = int(config["num_machines"] or 1)
    # A hostfile alone says how many machines there are.
    counted_by_file = config["deepspeed_hostfile"] and not config.is_given("num_machines")
    if machines < 2 and not counted_by_file:
        return Choice(False, "DeepSpeed on one machine runs under torch's agent")
    starter = _starter(config)
    if starter.value == _STANDARD:
        return Choice(False, f"torch's agent starts this machine's processes: {starter.reason}")
    if starter.value == _SLURM and inside_step(host):
        return Choice(False, "srun has started this task")
    return Choice(True, starter.reason)


def _plan(config: RunConfig, host: Host) -> LaunchPlan:
    """Decide by whom the processes of every machine are started.

    Raises:
        ConfigurationError: The machines, the filters or the programs are not such that it can work.
    """
    conflicts.check_deepspeed_filters(config)
    plans = {_PDSH: _plan_pdsh, _WITHOUT_SSH: _plan_without_ssh, _SLURM: _plan_slurm}
    return plans.get(_starter(config).value, _plan_mpi)(config, host)


def _named_machines(config: RunConfig) -> Machines:
    machines = find_machines(config)
    if machines is None:
        raise ConfigurationError(
            f"num_machines={config['num_machines']} ({config.origin('num_machines')}): {_starter(config).value} starts processes on "
            "the machines of a hostfile, and none was given. Add --deepspeed_hostfile with a line such as `worker-1 slots=8` "
            "for each machine, or start each by hand with --deepspeed_multinode_launcher standard."
        )
    return machines


def _find_program(config: RunConfig, host: Host, *names: str) -> str:
    """Return the first of some programs that is there."""
    found = next(filter(None, map(host.find_program, names)), None)
    if found is None:
        raise ConfigurationError(
            f"{_starter(config).reason}: {' or '.join(names)} starts the processes, and is not on the PATH. "
            f"{_INSTALLED_BY[names[0]]}, or start each machine by hand with --deepspeed_multinode_launcher standard."
        )
    return found


# --- DeepSpeed's own launcher -----------------------------------------------------------------------------------------


def _runner(config: RunConfig, host: Host, machines: Machines) -> list[str]:
    """Return the front of the command: DeepSpeed's runner, and a hostfile with just the machines that take part.

    What filters and numbers leave stands in that file: DeepSpeed takes a number of processes beyond a machine's slots.
    """
    if not host.has_package("deepspeed"):
        raise ConfigurationError(
            f"{_starter(config).reason}: DeepSpeed's own launcher is needed, and deepspeed is not installed. Install it with "
            "`pip install 'accelerate[deepspeed]'`, or start each machine by hand with --deepspeed_multinode_launcher standard."
        )
    argv = [host.python, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--hostfile", f"{FILES}/hostfile"]
    picked = filter_text(machines.hosts)
    if picked is not None:
        argv += ["--include", picked]
    if config["quiet"]:
        argv.append("--quiet")
    return argv


def _meeting_place(config: RunConfig) -> list[str]:
    """Return the words that DeepSpeed's runner hands to a shell of each machine as they are."""
    address = main_address(config)
    port = int(config["main_process_port"] or DEFAULT_PORT)
    return [*(["--master_addr", address] if address else []), "--master_port", str(port)]


def _plan_pdsh(config: RunConfig, host: Host) -> LaunchPlan:
    """Let DeepSpeed's runner start a launcher on each machine, by pdsh over ssh."""
    machines = _named_machines(config)
    for program in ("pdsh", "ssh"):
        _find_program(config, host, program)
    values = _for_other_machines(config, host, machines)
    own = _own_variables(host)
    # A shell on the other machine would change these, and pdsh would change a percent sign.
    delicate = {name: text for name, text in values.items() if text and not _PLAIN.fullmatch(text)}
    words = (script_kind(config), *script_words(config))
    if delicate or not all(_PLAIN.fullmatch(word) for word in words):
        words = encoded_words(words, delicate)
    lines = own | {name: text for name, text in values.items() if name not in delicate}
    argv = [*_runner(config, host, machines), "--launcher", _PDSH]
    if len(machines.hosts) == 1:
        # For one machine DeepSpeed would start the processes here, whatever its name is.
        argv.append("--force_multi")
    argv += _meeting_place(config)
    files = {
        "hostfile": hostfile_text(machines.hosts),
        _ENVIRONMENT_FILE: "".join(f"{name}={text}\n" for name, text in lines.items()),
    }
    environment = {**values, "DS_ENV_FILE": f"{FILES}/{_ENVIRONMENT_FILE}"}
    return LaunchPlan("spawn_command", (*argv, str(WORKER), *words), environment, machines.notes, files=files)


def _plan_without_ssh(config: RunConfig, host: Host) -> LaunchPlan:
    """Let DeepSpeed's runner start this machine's processes, as somebody does on each of the others."""
    machines = find_machines(config)
    if machines is None:
        local = int(config["num_processes"] or 1) // int(config["num_machines"])
        # Nobody is reached by these names: DeepSpeed numbers the machines of a hostfile.
        names = (f"machine-{rank}" for rank in range(int(config["num_machines"])))
        machines = Machines(tuple(HostSlots(name, tuple(range(local))) for name in names))
    conflicts.check_deepspeed_rank(config, len(machines.hosts))
    rank = int(config["machine_rank"] or 0)
    address = main_address(config) or machines.hosts[0].name
    port = int(config["main_process_port"] or DEFAULT_PORT)
    if rank == 0 and host.port_in_use(port):
        raise conflicts.port_in_use(config, port)
    local = len(machines.hosts[rank].slots)
    values = worker_environment(config, host, local) | {"LOCAL_WORLD_SIZE": str(local)}
    values |= interface_variables(host, host.outer_address(address))
    argv = [*_runner(config, host, machines), "--no_ssh", "--node_rank", str(rank)]
    argv += ["--master_addr", address, "--master_port", str(port)]
    command = (*argv, str(WORKER), script_kind(config), *script_words(config))
    files = {"hostfile": hostfile_text(machines.hosts)}
    return LaunchPlan("spawn_command", command, values, machines.notes, files=files)


# --- mpirun and srun --------------------------------------------------------------------------------------------------


def _plan_mpi(config: RunConfig, host: Host) -> LaunchPlan:
    """Start the processes by mpirun itself.

    DeepSpeed's runners for MPI refuse a number of machines or processes, put quotes into the values of variables, and that
    for MPICH returns success whatever its workers return (0.19.8).
    """
    starter = _starter(config)
    machines = _named_machines(config)
    _check_first_slots(machines, starter)
    program = _find_program(config, host, "mpirun", "mpiexec")
    family = mpi_family(host, program)
    if family is not _MPI[starter.value]:
        other = "openmpi" if family is OPEN_MPI else "mpich"
        raise ConfigurationError(
            f"{starter.reason}, and {program!r} belongs to another MPI, whose options differ. "
            f"Write --deepspeed_multinode_launcher {other}, or put the right mpirun first on the PATH."
        )
    values = _for_other_machines(config, host, machines)
    values |= {"MASTER_ADDR": main_address(config) or machines.hosts[0].name}
    values |= {"MASTER_PORT": str(config["main_process_port"] or DEFAULT_PORT)}
    taken = {name: text for name, text in host.environment.items() if name.startswith(_TAKEN_ALONG)}
    values = taken | _own_variables(host) | values
    lines = (family.host_line.format(each.name, len(each.slots)) for each in machines.hosts)
    argv = mpirun_command(program, family, machines.num_processes, f"{FILES}/hostfile", family.by_slot, values)
    files = {"hostfile": "".join(f"{line}\n" for line in lines)}
    command = (*argv, *recorded_command(config, host))
    return LaunchPlan("spawn_command", command, values, machines.notes, files=files)


def _plan_slurm(config: RunConfig, host: Host) -> LaunchPlan:
    """Let srun start this launcher once on each node, inside a job or as a job of its own."""
    starter = _starter(config)
    machines = find_machines(config)
    _find_program(config, host, "srun")
    nodes, local = int(config["num_machines"] or 1), None
    if machines is None:
        if config.is_given("num_processes"):
            local = int(config["num_processes"]) // nodes
        return srun_plan(config, host, nodes, processes_each=local)
    _check_first_slots(machines, starter)
    if not machines.are_alike:
        counts = ", ".join(f"{each.name} {len(each.slots)}" for each in machines.hosts)
        raise ConfigurationError(
            f"{starter.reason}: srun starts as many processes on one machine as on another, and their slots are {counts}. "
            "Give each the same number, or use --deepspeed_multinode_launcher pdsh."
        )
    names = tuple(each.name for each in machines.hosts)
    return srun_plan(config, host, len(names), names=names, processes_each=machines.most_on_one, notes=machines.notes)


def _check_first_slots(machines: Machines, starter: Choice[str]) -> None:
    """Refuse certain slots of a machine where only their number can be said."""
    odd = next((each for each in machines.hosts if not each.is_whole), None)
    if odd is not None:
        raise ConfigurationError(
            f"{starter.reason}: it starts a number of processes on a machine and cannot choose slots "
            f"{', '.join(map(str, odd.slots))} of {odd.name!r}. Filter whole machines or their last slots, or use "
            "--deepspeed_multinode_launcher pdsh."
        )


# --- variables --------------------------------------------------------------------------------------------------------


def _for_other_machines(config: RunConfig, host: Host, machines: Machines) -> dict[str, str]:
    """Return the variables of workers that start on other machines."""
    values = worker_environment(config, host, machines.most_on_one, here=False)
    if DEEPSPEED_DEVICE in host.environment:
        values[DEEPSPEED_DEVICE] = host.environment[DEEPSPEED_DEVICE]
    if machines.are_alike:
        # DeepSpeed's launcher calls it LOCAL_SIZE.
        values["LOCAL_WORLD_SIZE"] = str(machines.most_on_one)
    return values


def _own_variables(host: Host) -> dict[str, str]:
    """Return what the user's own environment file for DeepSpeed gives: the one in the home folder, then the one here."""
    name = host.environment.get("DS_ENV_FILE", ".deepspeed_env")
    found: dict[str, str] = {}
    for path in (Path.home() / name, Path(name)):
        if path.is_file():
            try:
                lines = read_limited(path).decode().splitlines()
            except (OSError, ValueError) as error:
                raise ConfigurationError(
                    f"DeepSpeed's environment file {str(path)!r} cannot be read: {first_line(error)}. Write lines such as "
                    "`NAME=value` into it, or remove it."
                ) from error
            pairs = (line.partition("=") for line in lines if "=" in line)
            found |= {key.strip(): text.strip() for key, _, text in pairs}
    return found


DEEPSPEED = Launcher("DeepSpeed launcher", _accepts, _plan)
