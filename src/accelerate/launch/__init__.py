"""Start a script on one process or many: choose the launcher, make its plan, carry the plan out."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from accelerate._base.helpers import Choice
from accelerate.config import conflicts, env
from accelerate.launch.deepspeed import DEEPSPEED
from accelerate.launch.elastic import ELASTIC, ONE_PROCESS
from accelerate.launch.host import Host
from accelerate.launch.mpi import MPI
from accelerate.launch.plan import DEEPSPEED_DEVICE, ElasticOptions, Launcher, LaunchPlan, computes_on_cpu
from accelerate.launch.slurm import SLURM
from accelerate.launch.tpu import TPU

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

__all__ = [
    "DEEPSPEED",
    "ELASTIC",
    "LAUNCHERS",
    "MPI",
    "ONE_PROCESS",
    "SLURM",
    "TPU",
    "choose_launcher",
    "make_plan",
    "run",
]

# In the order in which they are asked.
LAUNCHERS: tuple[Launcher, ...] = (TPU, SLURM, MPI, DEEPSPEED, ELASTIC, ONE_PROCESS)


def choose_launcher(config: RunConfig, host: Host, launchers: Sequence[Launcher] = LAUNCHERS) -> Choice[Launcher]:
    """Return the first launcher that accepts a configuration, else the last one, and why it was taken."""
    *others, last = launchers
    for launcher in others:
        answer = launcher.accepts(config, host)
        if answer.value:
            return Choice(launcher, answer.reason)
    return Choice(last, last.accepts(config, host).reason)


def make_plan(config: RunConfig, host: Host, launchers: Sequence[Launcher] = LAUNCHERS) -> LaunchPlan:
    """Check the script and decide everything about the launch, without starting anything.

    Args:
        launchers: Those to choose from.

    Raises:
        ConfigurationError: The run cannot be started as it was asked for.
    """
    conflicts.check_script(config, host.find_program)
    launcher = choose_launcher(config, host, launchers)
    plan = launcher.value.plan(config, host)
    notes = plan.notes
    if DEEPSPEED_DEVICE in plan.environment and DEEPSPEED_DEVICE not in host.environment:
        notes += (f"{DEEPSPEED_DEVICE}=cpu lets DeepSpeed compute on the CPU: {computes_on_cpu(config, host).reason}.",)
    return replace(plan, notes=notes, launcher=launcher.value.name, reason=launcher.reason, quiet=bool(config["quiet"]))


def run(plan: LaunchPlan, *, in_place: bool = False) -> int:
    """Start what a plan says, wait for it, and return the exit code of the run.

    Args:
        in_place: Let a single process take the place of this one: then this function does not return.

    Raises:
        ConfigurationError: The program of the plan cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if plan.mode == "exec" and in_place and os.name == "posix":
        try:
            os.execvpe(plan.argv[0], list(plan.argv), {**env.items(), **plan.environment})
        except OSError as error:
            raise conflicts.cannot_start(plan.argv[0], error) from error
    # What watches other processes is not loaded where the script takes the place of this one.
    from accelerate.launch import processes

    with processes.launch_folder(plan.files) as folder:
        argv, environment = plan.in_folder(folder)
        if plan.machines:
            return processes.run_machines(plan)
        if plan.elastic is not None:
            return _run_elastic(argv, environment, plan.elastic, folder, quiet=plan.quiet)
        return processes.run_command(plan, argv, environment, folder)


def _run_elastic(
    argv: tuple[str, ...], environment: dict[str, str], options: ElasticOptions, folder: str, *, quiet: bool
) -> int:
    from accelerate.launch.processes import GracefulWorkers

    workers = GracefulWorkers(folder)
    with env.patch_environment(**environment, **workers.variables, TORCHELASTIC_SIGNALS_TO_HANDLE=""):
        # A million lasting objects come with torch; to look through them again and again takes a sixth of the time.
        gc.disable()
        from accelerate.launch import agent

        gc.freeze()
        gc.enable()
        return agent.run_command(argv, options, workers, folder, quiet=quiet)
