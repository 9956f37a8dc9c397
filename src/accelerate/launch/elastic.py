"""Several processes on each of one or many machines, under torch's elastic agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.launch.command import recorded_command, worker_environment
from accelerate.launch.meeting import MeetingPoint, on_many_machines, on_this_machine
from accelerate.launch.plan import ElasticOptions, LaunchPlan
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

name = "torch elastic agent"
_INTERFACE = "GLOO_SOCKET_IFNAME"


def accepts(config: RunConfig, site: Site) -> Choice[bool]:
    """Accept more than one process or machine, and one process that the agent must watch or log."""
    processes, machines = config["num_processes"] or 1, config["num_machines"] or 1
    if machines > 1:
        return Choice(True, f"num_machines={machines}")
    if processes > 1:
        return Choice(True, f"num_processes={processes}")
    for option, idle in (("max_restarts", 0), ("log_dir", None), ("tee", "0")):
        if config[option] not in {idle, None}:
            return Choice(True, f"{option}={config[option]!r} needs an agent beside the process")
    return Choice(False, "one process on one machine")


def plan(config: RunConfig, site: Site) -> LaunchPlan:
    """Start this machine's share of the processes under an agent."""
    machines = int(config["num_machines"] or 1)
    local = processes_per_machine(config)
    if machines == 1:
        return agent_plan(config, site, local, on_this_machine(config, site))
    rank = _machine_rank(config)
    return agent_plan(
        config, site, local, on_many_machines(config, site, machine_rank=rank), machines=machines, machine_rank=rank
    )


def processes_per_machine(config: RunConfig) -> int:
    """Return how many processes each machine starts.

    Raises:
        ConfigurationError: If the processes cannot be shared out evenly.
    """
    processes, machines = int(config["num_processes"] or 1), int(config["num_machines"] or 1)
    if processes % machines:
        nearest = max(1, processes // machines) * machines
        raise ConfigurationError(
            f"num_processes={processes} ({config.origin('num_processes')}) is the total over all machines and cannot be "
            f"shared evenly among num_machines={machines}. Write --num_processes {nearest}, or another multiple."
        )
    return processes // machines


def agent_plan(
    config: RunConfig, site: Site, local: int, point: MeetingPoint, *, machines: int = 1, machine_rank: int = 0
) -> LaunchPlan:
    """Build the plan of an agent once it is known how many processes meet where."""
    backend = str(config["rdzv_backend"] or "static")
    configs = _parse_rendezvous(str(config["rdzv_conf"] or ""))
    local_addr: str | None = "127.0.0.1"
    if machines > 1:
        # By name a machine may find its own loopback address; the others need the one they can reach.
        local_addr = site.address_towards(point.address)
    if point.port is None:
        # The agent binds the port itself, so that nobody can take it between the choice and the use.
        backend, endpoint = ("c10d" if backend == "static" else backend), "localhost:0"
    else:
        endpoint = f"[{point.address}]:{point.port}" if ":" in point.address else f"{point.address}:{point.port}"
    configs |= _own_place(backend, machines, machine_rank, known=config.is_given("machine_rank") or machine_rank > 0)
    options = ElasticOptions(
        nproc_per_node=local,
        num_nodes=machines,
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=configs,
        role=str(config["role"] or "default"),
        max_restarts=int(config["max_restarts"] or 0),
        monitor_interval=float(config["monitor_interval"] or 0.1),
        log_dir=config["log_dir"],
        tee=str(config["tee"] or "0"),
        local_addr=local_addr,
        seconds_to_end=seconds_to_end(config, site),
    )
    environment = worker_environment(config, site, local)
    if machines > 1 and local_addr is not None and _INTERFACE not in site.environment:
        # gloo announces the address that the host name leads to, which is often the loopback one.
        interface = site.interface_of(local_addr)
        environment |= {_INTERFACE: interface} if interface else {}
    return LaunchPlan("elastic", recorded_command(config, site), environment, point.notes, options, launcher=name)


def seconds_to_end(config: RunConfig, site: Site) -> float:
    """Return how long workers may take to end when the run is asked to stop."""
    if config.is_given("preemption_grace"):
        return float(config["preemption_grace"])
    return float(site.integer("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or config["preemption_grace"])


def _own_place(backend: str, machines: int, machine_rank: int, *, known: bool) -> dict[str, str]:
    if backend == "static":
        return {"rank": str(machine_rank)}
    # Without a rank the c10d backend compares host names to find out who holds the store.
    return {"is_host": str(machine_rank == 0)} if backend == "c10d" and machines > 1 and known else {}


def _machine_rank(config: RunConfig) -> int:
    machines, rank = int(config["num_machines"]), config["machine_rank"]
    needed = str(config["rdzv_backend"] or "static") == "static"
    if needed and not config.is_given("machine_rank"):
        raise ConfigurationError(
            f"num_machines={machines} ({config.origin('num_machines')}) and this machine's place among them was not "
            f"given. Add --machine_rank, from 0 to {machines - 1}, or --rdzv_backend c10d, which needs none."
        )
    rank = int(rank or 0)
    if not 0 <= rank < machines:
        raise ConfigurationError(
            f"machine_rank={rank} ({config.origin('machine_rank')}) is not a place among {machines} machines. "
            f"Write --machine_rank with a number from 0 to {machines - 1}."
        )
    return rank


def _parse_rendezvous(text: str) -> dict[str, str]:
    """Read a list such as `timeout=60,join_timeout=10`."""
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise ConfigurationError(
                f"rdzv_conf={text!r}: {pair!r} has no value. Write pairs, such as --rdzv_conf timeout=60,is_host=true."
            )
    return {key.strip(): value.strip() for key, value in (pair.split("=", 1) for pair in pairs)}
