"""The plan of a launch: its command, its environment, and how the processes are started."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from accelerate._base.constants import HANDLE_SIGNALS
from accelerate._base.helpers import Choice
from accelerate.config.run_config import encode
from accelerate.launch.host import Host

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

Mode = Literal["exec", "elastic", "spawn_command"]

# As long as Slurm and Kubernetes leave a job to save its state.
SECONDS_TO_END = 30.0

# Stands in a command for the folder into which the files of a plan are written.
FILES = "@accelerate-files@"

WORKER = Path(__file__).with_name("worker.py")
# The address of the first process depends on the launcher, the threads on how many processes share this machine.
_SET_BY_LAUNCHER = frozenset({"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"})
# Names the folder where workers of this machine leave the record of a failure.
FAILURE_FOLDER = "ACCELERATE_FAILURE_FOLDER"
# Says to DeepSpeed what it computes on.
DEEPSPEED_DEVICE = "DS_ACCELERATOR"
# Rendezvous backends whose store is held by one of the machines; others have a server for it.
OWN_STORES = ("static", "c10d")


@dataclass(frozen=True)
class ElasticOptions:
    """The arguments of torch's elastic agent on this machine.

    Args:
        num_nodes: The most machines that take part.
        min_nodes: The fewest with which the run begins and goes on; None waits for all.
        signals: Those to the launcher that end the run; None for all that end a program.
    """

    nproc_per_node: int
    num_nodes: int = 1
    min_nodes: int | None = None
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = "localhost:0"
    rdzv_configs: Mapping[str, str] = field(default_factory=dict)
    run_id: str = "none"
    role: str = "default"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str = "0"
    redirects: str = "0"
    local_ranks_filter: tuple[int, ...] = ()
    log_line_prefix_template: str | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    logs_specs: str | None = None
    event_log_handler: str = "null"
    numa_binding: str | None = None
    virtual_local_rank: bool = False
    local_addr: str | None = None
    seconds_to_end: float = SECONDS_TO_END
    signals: tuple[str, ...] | None = None


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that starting a run needs, decided before anything is started.

    Args:
        mode: `exec` puts the command in the place of the launcher, `elastic` starts it on several processes under
            torch's elastic agent, `spawn_command` starts another launcher and waits for it.
        environment: Variables that are set on top of those of this process.
        files: Names and contents of files that the command needs; `FILES` in the command stands for their folder.
        machines: Commands that run at the same time, by the name of the machine that each is for; `argv` is the first.
            Empty for a single command.
        seconds_to_end: How long a command may take to end when it is told to.
        launcher: Who made the plan.
        reason: Why this launcher was chosen.
        quiet: Report a failed worker in one line, without its traceback.
    """

    mode: Mode
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    elastic: ElasticOptions | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    machines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seconds_to_end: float = SECONDS_TO_END
    launcher: str = ""
    reason: str = ""
    quiet: bool = False

    def in_folder(self, folder: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return command and environment with the folder of the files filled in."""
        argv = tuple(word.replace(FILES, folder) for word in self.argv)
        values = {name: text.replace(FILES, folder) for name, text in self.environment.items()}
        return argv, values


@dataclass(frozen=True)
class Launcher:
    """One way to start processes.

    Args:
        accepts: Says whether this launcher starts such a run, and why.
        plan: Decides everything without starting anything.
    """

    name: str
    accepts: Callable[[RunConfig, Host], Choice[bool]]
    plan: Callable[[RunConfig, Host], LaunchPlan]


def script_command(config: RunConfig, host: Host) -> tuple[str, ...]:
    """Return the command a user would type without a launcher."""
    if config["no_python"]:
        return script_words(config)
    return (host.python, *(("-m",) if config["module"] else ()), *script_words(config))


def recorded_command(config: RunConfig, host: Host) -> tuple[str, ...]:
    """Return the command of a worker whose failure is recorded for the launcher's report."""
    if config["no_python"]:
        return script_words(config)
    # Unbuffered, so that the lines of several workers appear when they are written.
    return (host.python, "-u", str(WORKER), script_kind(config), *script_words(config))


def script_kind(config: RunConfig) -> str:
    """Return how `worker.py` is told to run what was named."""
    if config["no_python"]:
        return "program"
    return "module" if config["module"] else "script"


def encoded_words(words: tuple[str, ...], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return arguments of `worker.py` that no shell on the way changes, and that set variables before the script."""
    content = json.dumps({"arguments": words, "variables": dict(variables)})
    return ("encoded", base64.urlsafe_b64encode(content.encode()).decode())


def script_words(config: RunConfig) -> tuple[str, ...]:
    """Return the script and its arguments."""
    return (str(config["training_script"]), *map(str, config["training_script_args"] or ()))


def worker_environment(config: RunConfig, host: Host, local_processes: int, *, here: bool = True) -> dict[str, str]:
    """Return the variables that tell the workers their settings, with the number of threads each may use.

    Args:
        here: The workers run on this machine, so that what it has is what they have.
    """
    values = {name: value for name, value in encode(config).items() if name not in _SET_BY_LAUNCHER}
    values[HANDLE_SIGNALS] = "1"
    if computes_on_cpu(config, host, here=here).value:
        values[DEEPSPEED_DEVICE] = "cpu"
    if local_processes > 1:
        # It binds threads to the first cores, the same ones in every process.
        values.pop("KMP_AFFINITY", None)
        if not config["cpu"]:
            links = host.link_variables(config.machine)
            values |= {name: value for name, value in links.items() if name not in host.environment}
    if config["num_cpu_threads_per_process"]:
        values["OMP_NUM_THREADS"] = str(config["num_cpu_threads_per_process"])
    elif local_processes > 1 and "OMP_NUM_THREADS" not in host.environment:
        # Beside an accelerator the processor mostly waits; on its own it does the work and is shared out. One process
        # keeps torch's choice, as without a launcher.
        share = host.physical_cores() // local_processes if config["cpu"] else 1
        values["OMP_NUM_THREADS"] = str(max(1, share))
    return values


def computes_on_cpu(config: RunConfig, host: Host, *, here: bool = True) -> Choice[bool]:
    """Say whether DeepSpeed must be told to compute on the CPU, and why."""
    forced = host.environment.get("ACCELERATE_TORCH_DEVICE", "")
    if not config["use_deepspeed"]:
        return Choice(False, "DeepSpeed was not asked for")
    if DEEPSPEED_DEVICE in host.environment:
        return Choice(False, f"{DEEPSPEED_DEVICE} is set already")
    if config["cpu"]:
        return Choice(True, f"cpu=True ({config.origin('cpu')})")
    if forced:
        return Choice(forced.startswith("cpu"), f"ACCELERATE_TORCH_DEVICE={forced}")
    return Choice(here and not config.machine.has_accelerator, f"this machine has {config.machine}")


def seconds_to_end(config: RunConfig, host: Host) -> float:
    """Return how long workers may take to end when the run is asked to stop."""
    if config.is_given("preemption_grace"):
        return float(config["preemption_grace"])
    return float(host.integer("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or config["preemption_grace"])
