"""One process in the place of the launcher, or several on each machine under torch's elastic agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.helpers import Choice
from accelerate.config import conflicts
from accelerate.config.sections.registry import options
from accelerate.launch.host import (
    DEFAULT_PORT,
    Host,
    Rendezvous,
    given_port,
    local_rendezvous,
    main_address,
    rank_config,
)
from accelerate.launch.plan import (
    OWN_STORES,
    ElasticOptions,
    Launcher,
    LaunchPlan,
    recorded_command,
    script_command,
    seconds_to_end,
    worker_environment,
)

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

# These share work between ranks and set up a process group for any number of them.
_GROUP_OPTIONS = ("multi_gpu", "use_fsdp", "use_deepspeed", "use_megatron_lm")
# These are about the agent's work, or from a command line of torchrun, whose scripts look for their rank in any case.
_AGENT_OPTIONS = (
    *("max_restarts", "log_dir", "tee", "redirects", "local_ranks_filter", "logs_specs", "event_log_handler"),
    *("duplicate_stdout_filters", "duplicate_stderr_filters", "numa_binding"),
    *("nproc_per_node", "nnodes", "standalone"),
)
# These go to the agent as they are.
_HANDED_ON = (
    *("role", "max_restarts", "monitor_interval", "log_dir", "tee", "redirects", "logs_specs", "event_log_handler"),
    *("numa_binding", "virtual_local_rank", "log_line_prefix_template"),
)
_INTERFACE = "GLOO_SOCKET_IFNAME"


def _plan_one(config: RunConfig, host: Host) -> LaunchPlan:
    values = worker_environment(config, host, 1)
    if not any(config[option] for option in _GROUP_OPTIONS) or conflicts.is_pod(host.environment):
        return LaunchPlan("exec", script_command(config, host), values)
    rendezvous = local_rendezvous(config, host)
    values |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    values |= {"MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.fixed_port(host))}
    return LaunchPlan("exec", script_command(config, host), values, rendezvous.notes)


def _needs_agent(config: RunConfig, host: Host) -> Choice[bool]:
    """Accept more than one process or machine, and one process that the agent must watch or log."""
    processes, machines = config["num_processes"] or 1, config["num_machines"] or 1
    if machines > 1:
        return Choice(True, f"num_machines={machines}")
    if processes > 1:
        return Choice(True, f"num_processes={processes}")
    for option in _AGENT_OPTIONS:
        if config[option] and config[option] != options()[option].default:
            return Choice(True, f"{option}={config[option]!r} needs an agent beside the process")
    return Choice(False, "one process on one machine")


def _plan_agent(config: RunConfig, host: Host) -> LaunchPlan:
    machines, rank = int(config["num_machines"] or 1), int(config["machine_rank"] or 0)
    local = processes_per_machine(config)
    backend = str(config["rdzv_backend"] or "static")
    if machines == 1 and (backend in OWN_STORES or not config["main_process_ip"]):
        return agent_plan(config, host, local, local_rendezvous(config, host))
    conflicts.check_machines(config)
    port = given_port(config) or DEFAULT_PORT
    # Without a rank, machines under c10d settle among themselves who is the first.
    first = rank == 0 and backend in OWN_STORES and (backend == "static" or config.is_given("machine_rank"))
    if first and host.port_in_use(port):
        raise conflicts.port_in_use(config, port)
    # Other backends, and a store in a file, meet at what need not be a machine.
    meets_at_machine = backend in OWN_STORES and "store_type" not in str(config["rdzv_conf"] or "")
    address = main_address(config) if meets_at_machine else config["main_process_ip"]
    rendezvous = Rendezvous(str(address), port)
    return agent_plan(config, host, local, rendezvous, machines=machines, machine_rank=rank)


def processes_per_machine(config: RunConfig) -> int:
    """Return how many processes each machine starts.

    Raises:
        ConfigurationError: The processes cannot be shared out evenly.
    """
    conflicts.check_even_share(config)
    return int(config["num_processes"] or 1) // int(config["num_machines"] or 1)


def agent_plan(
    config: RunConfig, host: Host, local: int, rendezvous: Rendezvous, *, machines: int = 1, machine_rank: int = 0
) -> LaunchPlan:
    """Return the plan of an agent, once it is known how many processes rendezvous at which address.

    Raises:
        ConfigurationError: `rdzv_conf` is not a list of pairs.
    """
    backend = str(config["rdzv_backend"] or "static")
    local_addr = card = config["local_addr"] or ("127.0.0.1" if machines == 1 else None)
    if local_addr is None:
        card = host.outer_address(rendezvous.address)
        # Elsewhere this machine's own name leads to an address that others reach.
        local_addr = rendezvous.address if host.is_own_name(rendezvous.address) else card
    if rendezvous.port is None:
        # The agent binds the port itself, so that nobody can take it between the choice and the use.
        backend, endpoint = ("c10d" if backend == "static" else backend), "localhost:0"
    else:
        address = f"[{rendezvous.address}]" if ":" in rendezvous.address else rendezvous.address
        endpoint = f"{address}:{rendezvous.port}"
    conflicts.check_rendezvous_options(config)
    pairs = (pair.split("=", 1) for pair in str(config["rdzv_conf"] or "").split(",") if pair.strip())
    configs = {key.strip(): value.strip() for key, value in pairs}
    known = config.is_given("machine_rank") or machine_rank > 0
    agent = ElasticOptions(
        nproc_per_node=local,
        num_nodes=machines,
        min_nodes=config["min_machines"],
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs=configs | rank_config(backend, machine_rank, machines, known=known),
        run_id=str(config["rdzv_id"] or "none"),
        local_ranks_filter=tuple(int(rank) for rank in str(config["local_ranks_filter"] or "").split(",") if rank),
        duplicate_stdout_filters=tuple(config["duplicate_stdout_filters"] or ()),
        duplicate_stderr_filters=tuple(config["duplicate_stderr_filters"] or ()),
        local_addr=local_addr,
        seconds_to_end=seconds_to_end(config, host),
        signals=tuple(config["signals_to_handle"].split(",")) if config.is_given("signals_to_handle") else None,
        **{name: config[name] for name in _HANDED_ON if config[name] is not None},
    )
    environment = worker_environment(config, host, local) | interface_variables(host, card)
    return LaunchPlan("elastic", recorded_command(config, host), environment, rendezvous.notes, agent)


def interface_variables(host: Host, address: str | None) -> dict[str, str]:
    """Return the variable that names the network interface of this machine's address, where it can be found out."""
    if address is None or _INTERFACE in host.environment:
        return {}
    # gloo announces the address that the host name leads to, which is often the loopback one.
    interface = host.interface_of(address)
    return {_INTERFACE: interface} if interface else {}


ONE_PROCESS = Launcher("one process", lambda config, host: Choice(True, "one process on one machine"), _plan_one)
ELASTIC = Launcher("torch elastic agent", _needs_agent, _plan_agent)
