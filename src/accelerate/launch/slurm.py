"""Slurm: take the place that srun gave this task, share a node's task out, or ask srun for the other nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.devices.machine import first_host, port_of_job, tasks_of_nodes
from accelerate.launch.command import script_command, worker_environment
from accelerate.launch.elastic import agent_plan, seconds_to_end
from accelerate.launch.meeting import MeetingPoint
from accelerate.launch.origins import is_typed
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

name = "Slurm"
_SECONDS_MORE = 5.0


@dataclass(frozen=True)
class Step:
    """The place of this task in a step that srun started."""

    rank: int
    tasks: int
    local_rank: int
    local_tasks: int
    node: int
    nodes: int
    node_list: str
    job: str

    @property
    def one_task_a_node(self) -> bool:
        """Whether each task has a machine for itself and can start several workers there."""
        return self.tasks == self.nodes


def accepts(config: RunConfig, site: Site) -> Choice[bool]:
    """Accept inside a step of several tasks, and in a batch script that holds several nodes."""
    # Who names the machines by hand has arranged the meeting himself.
    if is_typed(config, "main_process_ip") or is_typed(config, "machine_rank"):
        return Choice(False, "the machines are named on the command line")
    step = find_step(site)
    if step is not None:
        return Choice(step.tasks > 1, f"srun started {step.tasks} tasks")
    nodes = _allocated_nodes(site)
    if nodes < 2 or (config.is_given("num_machines") and int(config["num_machines"] or 1) < 2):
        return Choice(False, "this job has one node, or one machine was asked for")
    return Choice(True, f"a batch script on {nodes} nodes, outside srun")


def plan(config: RunConfig, site: Site) -> LaunchPlan:
    """Derive ranks, hosts and port from Slurm's variables."""
    step = find_step(site)
    if step is None:
        return _ask_srun(config, site)
    asked = int(config["num_processes"] or 1)
    given = config.is_given("num_processes")
    # Devices were counted on this machine, where only one task runs: the task stands for all of them.
    shared_out = asked > step.tasks if given else asked > 1
    if step.one_task_a_node and shared_out:
        return _share_node(config, site, step, total=asked if given else asked * step.nodes)
    if given and asked not in {1, step.tasks}:
        raise ConfigurationError(
            f"num_processes={asked} ({config.origin('num_processes')}) and srun started {step.tasks} tasks on "
            f"{step.nodes} nodes, so it is unclear who runs what. Start {asked} tasks (`srun --ntasks={asked}`), or one "
            f"task a node (`srun --ntasks-per-node=1`) and let this launcher start the rest."
        )
    return _take_place(config, site, step)


def _take_place(config: RunConfig, site: Site, step: Step) -> LaunchPlan:
    ranks = {
        "RANK": step.rank,
        "WORLD_SIZE": step.tasks,
        "LOCAL_RANK": step.local_rank,
        "LOCAL_WORLD_SIZE": step.local_tasks,
        "MASTER_PORT": _port(config, step.job),
    }
    values = worker_environment(config, site, step.local_tasks) | {key: str(value) for key, value in ranks.items()}
    values["MASTER_ADDR"] = _address(config, step.node_list)
    note = f"srun started {step.tasks} tasks; this one becomes rank {step.rank}, and nothing more is started here."
    return LaunchPlan("exec", script_command(config, site), values, _once(step, note), launcher=name)


def _share_node(config: RunConfig, site: Site, step: Step, *, total: int) -> LaunchPlan:
    if total % step.nodes:
        raise ConfigurationError(
            f"num_processes={total} ({config.origin('num_processes')}) cannot be shared evenly among the {step.nodes} "
            f"nodes of this step. Write --num_processes {max(1, total // step.nodes) * step.nodes}."
        )
    local = total // step.nodes
    note = f"srun started one task on each of {step.nodes} nodes; this one starts {local} of {total} processes."
    point = MeetingPoint(_address(config, step.node_list), _port(config, step.job), _once(step, note))
    return agent_plan(config, site, local, point, machines=step.nodes, machine_rank=step.node)


def _once(step: Step, note: str) -> tuple[str, ...]:
    """Let the first of many tasks speak for all."""
    return (note,) if step.rank == 0 else ()


def _ask_srun(config: RunConfig, site: Site) -> LaunchPlan:
    nodes = _allocated_nodes(site)
    if site.find_program("srun") is None:
        raise ConfigurationError(
            f"This job holds {nodes} nodes and srun is not on the PATH, so the others cannot be reached from here. "
            "Load Slurm's programs, or add --num_machines 1 to use this node alone."
        )
    threads = site.environment.get("SLURM_CPUS_PER_TASK")
    # srun does not take this over from the batch script by itself.
    resources = (f"--cpus-per-task={threads}",) if threads else ()
    argv = ("srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *resources)
    note = (
        f"A batch script runs on the first of its {nodes} nodes only: srun starts this launcher once on each of them. "
        "Add --num_machines 1 to stay on this node."
    )
    command = (site.python, "-m", "accelerate.commands.launch", *site.arguments)
    # The launchers that it starts need a moment more than their workers.
    seconds = seconds_to_end(config, site) + _SECONDS_MORE
    return LaunchPlan("spawn_command", (*argv, *command), {}, (note,), launcher=name, seconds_to_end=seconds)


def find_step(site: Site) -> Step | None:
    """Return the place in a step, None outside of one.

    The batch script has SLURM_PROCID too; SLURM_STEP_NUM_TASKS exists only where srun started the process.
    """
    rank, tasks = site.integer("SLURM_PROCID"), site.integer("SLURM_STEP_NUM_TASKS")
    if rank is None or tasks is None:
        return None
    node = site.integer("SLURM_NODEID") or 0
    per_node = tasks_of_nodes(site.environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return Step(
        rank=rank,
        tasks=tasks,
        local_rank=site.integer("SLURM_LOCALID") or 0,
        local_tasks=per_node[node] if node < len(per_node) else tasks,
        node=node,
        nodes=site.integer("SLURM_STEP_NUM_NODES") or len(per_node) or 1,
        node_list=site.environment.get("SLURM_STEP_NODELIST") or site.environment.get("SLURM_JOB_NODELIST", ""),
        job=site.environment.get("SLURM_JOB_ID", "0"),
    )


def _allocated_nodes(site: Site) -> int:
    if "SLURM_JOB_ID" not in site.environment:
        return 0
    return site.integer("SLURM_JOB_NUM_NODES") or site.integer("SLURM_NNODES") or 1


def _address(config: RunConfig, nodes: str) -> str:
    return str(config["main_process_ip"] or first_host(nodes))


def _port(config: RunConfig, job: str) -> int:
    """Return the port asked for, else that of the job."""
    if config.is_given("main_process_port") and config["main_process_port"]:
        return int(config["main_process_port"])
    return port_of_job(job)
