"""Slurm: become the rank of a task of srun, start a node's share of the processes, or call srun for the other nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate._base.helpers import Choice
from accelerate.config import cluster_conflicts
from accelerate.devices.machine import first_host, port_of_job, tasks_of_nodes
from accelerate.launch.elastic import agent_plan
from accelerate.launch.host import LOOPBACK, Host, Rendezvous, given_port, main_address
from accelerate.launch.plan import Launcher, LaunchPlan, script_command, seconds_to_end, worker_environment

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

# The launchers that srun starts need a moment more than their workers.
_EXTRA_SECONDS = 5.0


@dataclass(frozen=True)
class SlurmStep:
    """The place of this task in a job step that srun started."""

    rank: int
    tasks: int
    local_rank: int
    local_tasks: int
    node: int
    nodes: int
    node_list: str
    job: str

    def rendezvous(self, config: RunConfig, note: str) -> Rendezvous:
        """Return the address and port that all tasks derive alike; the first task gives the note for all."""
        # Tasks of one node need no address that other machines can reach.
        address = main_address(config) or (LOOPBACK if self.nodes == 1 else first_host(self.node_list))
        notes = (note,) if self.rank == 0 else ()
        return Rendezvous(address, given_port(config) or port_of_job(self.job), notes)


def _find_step(host: Host) -> SlurmStep | None:
    """Return the place in a step, None outside of one.

    The batch script has SLURM_PROCID too; SLURM_STEP_NUM_TASKS exists only where srun started the process.
    """
    rank, tasks = host.integer("SLURM_PROCID"), host.integer("SLURM_STEP_NUM_TASKS")
    if rank is None or tasks is None:
        return None
    node = host.integer("SLURM_NODEID") or 0
    per_node = tasks_of_nodes(host.environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return SlurmStep(
        rank=rank,
        tasks=tasks,
        local_rank=host.integer("SLURM_LOCALID") or 0,
        local_tasks=per_node[node] if node < len(per_node) else tasks,
        node=node,
        nodes=host.integer("SLURM_STEP_NUM_NODES") or len(per_node) or 1,
        node_list=host.environment.get("SLURM_STEP_NODELIST") or host.environment.get("SLURM_JOB_NODELIST", ""),
        job=host.environment.get("SLURM_JOB_ID", "0"),
    )


def _allocated_nodes(host: Host) -> int:
    if "SLURM_JOB_ID" not in host.environment:
        return 0
    return host.integer("SLURM_JOB_NUM_NODES") or host.integer("SLURM_NNODES") or 1


def _accepts(config: RunConfig, host: Host) -> Choice[bool]:
    """Accept inside a step of several tasks, and in a batch script that holds several nodes."""
    step = _find_step(host)
    by_slurm = config["use_deepspeed"] and config["deepspeed_multinode_launcher"] == "slurm"
    # Who names the machines on the command line starts them as well, unless srun was asked to and has.
    named = config.is_typed("main_process_ip") or config.is_typed("machine_rank")
    if named and not (by_slurm and step is not None):
        return Choice(False, "the machines are named on the command line")
    if step is not None:
        return Choice(step.tasks > 1, f"srun started {step.tasks} tasks")
    if config["use_deepspeed"] and config["deepspeed_hostfile"]:
        return Choice(False, f"deepspeed_hostfile={config['deepspeed_hostfile']!r} names the machines")
    nodes = _allocated_nodes(host)
    if nodes < 2 or (config.is_given("num_machines") and int(config["num_machines"] or 1) < 2):
        return Choice(False, "this job has one node, or one machine was asked for")
    return Choice(True, f"a batch script on {nodes} nodes, outside srun")


def _plan(config: RunConfig, host: Host) -> LaunchPlan:
    step = _find_step(host)
    if step is None:
        return _plan_srun(config, host)
    asked, given = int(config["num_processes"] or 1), config.is_given("num_processes")
    # Devices were counted on this machine, where only one task runs: the task stands for all of them.
    several_per_task = asked > step.tasks if given else asked > 1
    if step.tasks == step.nodes and several_per_task:
        return _plan_share(config, host, step, total=asked if given else asked * step.nodes)
    if given and asked not in {1, step.tasks}:
        raise cluster_conflicts.tasks_differ(config, step.tasks, step.nodes)
    note = f"srun started {step.tasks} tasks; this one becomes rank {step.rank}, and nothing more is started here."
    rendezvous = step.rendezvous(config, note)
    ranks = {
        "RANK": step.rank,
        "WORLD_SIZE": step.tasks,
        "LOCAL_RANK": step.local_rank,
        "LOCAL_WORLD_SIZE": step.local_tasks,
        "MASTER_PORT": rendezvous.port,
        "MASTER_ADDR": rendezvous.address,
    }
    values = worker_environment(config, host, step.local_tasks) | {key: str(value) for key, value in ranks.items()}
    return LaunchPlan("exec", script_command(config, host), values, rendezvous.notes)


def _plan_share(config: RunConfig, host: Host, step: SlurmStep, *, total: int) -> LaunchPlan:
    """Start this node's processes under an agent, where each task has a node for itself."""
    if total % step.nodes:
        raise cluster_conflicts.uneven_nodes(config, total, step.nodes)
    local = total // step.nodes
    note = f"srun started one task on each of {step.nodes} nodes; this one starts {local} of {total} processes."
    rendezvous = step.rendezvous(config, note)
    return agent_plan(config, host, local, rendezvous, machines=step.nodes, machine_rank=step.node)


def _plan_srun(config: RunConfig, host: Host) -> LaunchPlan:
    nodes = _allocated_nodes(host)
    if host.find_program("srun") is None:
        raise cluster_conflicts.no_srun(nodes)
    note = (
        f"A batch script runs on the first of its {nodes} nodes only: srun starts this launcher once on each of them. "
        "Add --num_machines 1 to stay on this node."
    )
    return srun_plan(config, host, nodes, notes=(note,))


def inside_step(host: Host) -> bool:
    """Say whether srun has started this process."""
    return _find_step(host) is not None


def srun_plan(
    config: RunConfig,
    host: Host,
    nodes: int,
    *,
    names: tuple[str, ...] = (),
    processes_each: int | None = None,
    notes: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the plan by which srun starts this launcher once on each node.

    Args:
        names: The nodes, where they are to be certain ones.
        processes_each: How many processes each node starts; None lets the launchers that are started find it out.
    """
    argv = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    threads = host.environment.get("SLURM_CPUS_PER_TASK")
    # srun does not take this over from the batch script by itself.
    argv += [f"--cpus-per-task={threads}"] if threads else []
    argv += [f"--nodelist={','.join(names)}"] if names else []
    if processes_each is not None and not _allocated_nodes(host) and not config["cpu"]:
        # Outside of a job srun asks for one: with what its processes compute on.
        argv.append(f"--gpus-per-node={processes_each}")
    # What was typed stands behind it and wins.
    number = ("--num_processes", str(processes_each * nodes)) if processes_each is not None else ()
    command = (*argv, host.python, "-m", "accelerate.commands.launch", *number, *host.arguments)
    seconds = seconds_to_end(config, host) + _EXTRA_SECONDS
    return LaunchPlan("spawn_command", command, {}, notes, seconds_to_end=seconds)


SLURM = Launcher("Slurm", _accepts, _plan)
