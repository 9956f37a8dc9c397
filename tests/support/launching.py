"""Configurations and surroundings for tests of the launchers, and the launcher as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.processes import run_warm_script, script_environment, without_gloo_notes

from accelerate.commands import launch as launch_program
from accelerate.config.run_config import OptionSource, Origin, Resolved, RunConfig
from accelerate.config.sections.registry import options
from accelerate.devices.machine import Machine
from accelerate.launch.host import Host
from accelerate.launch.plan import LaunchPlan

PYTHON = "python3"


def make_config(
    script: str = "train.py",
    arguments: Sequence[str] = (),
    *,
    file: Mapping[str, Any] | None = None,
    detected: Mapping[str, Any] | None = None,
    **flags: Any,
) -> RunConfig:
    """Return a configuration: defaults, then what was detected, what a file gave, and what was typed."""
    values = {name: Resolved(option.default, Origin(OptionSource.DEFAULT)) for name, option in options().items()}
    values["training_script"] = Resolved(script, Origin(OptionSource.FLAG))
    values["training_script_args"] = Resolved(list(arguments), Origin(OptionSource.FLAG))
    layers = ((detected or {}, OptionSource.DETECTED), (file or {}, OptionSource.FILE), (flags, OptionSource.FLAG))
    for given, source in layers:
        for name, value in given.items():
            detail = f"--{name}" if source is OptionSource.FLAG else ""
            assert name in values, f"{name} is not an option"
            values[name] = Resolved(value, Origin(source, detail))
    return RunConfig(values, machine=Machine(cpu_count=8))


class FakeHost(Host):
    """A machine with eight cores and every program, on which every port is free and nothing can be reached."""

    python = PYTHON

    def __init__(self, environment: Mapping[str, str], **facts: Any) -> None:
        super().__init__(environment)
        vars(self).update(facts)

    def find_program(self, name: str) -> str | None:
        return name

    def has_package(self, name: str) -> bool:
        return True

    def tpu_cores(self, environment: Mapping[str, str]) -> list[int]:
        return []

    def port_in_use(self, port: int) -> bool:
        return False

    def free_port(self) -> int:
        return 29501

    def link_variables(self, machine: Machine) -> Mapping[str, str]:
        return {}

    def physical_cores(self) -> int:
        return 8

    def mpi_version(self, program: str) -> str:
        return "Open MPI"

    def address_towards(self, host: str) -> str | None:
        return None

    def interface_of(self, address: str) -> str | None:
        return None


def launch_command(*arguments: str) -> list[str]:
    """Return the command of `accelerate launch` for the package under test."""
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *arguments]


def launch(*arguments: str, env: Mapping[str, str] | None = None, cwd: Any = None) -> subprocess.CompletedProcess[str]:
    """Run `accelerate launch` to its end."""
    done = subprocess.run(
        launch_command(*arguments),
        env=launch_environment(env),
        cwd=cwd,
        timeout=600,
        capture_output=True,
        text=True,
        check=False,
    )
    done.stdout = without_gloo_notes(done.stdout)
    return done


def facts_of(output: str) -> list[dict[str, object]]:
    """Return what each worker wrote about itself, one JSON object a line, in the order of their ranks."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda facts: str(facts["RANK"]))


@contextmanager
def forked_launches() -> Iterator[list[str]]:
    """Let every launch of this process be carried out in processes that are forked from it.

    Options are parsed, resolved and planned by the launcher's own code, and the workers get the environment of its plan.
    Only torch's agent is left out, and that each worker loads torch anew.

    Yields:
        What the workers of each launch wrote to stdout, in rank order.
    """
    outputs: list[str] = []

    def run_forked(plan: LaunchPlan, **_: Any) -> int:
        assert plan.elastic is None or plan.elastic.num_nodes == 1
        processes = 1 if plan.elastic is None else plan.elastic.nproc_per_node
        # Behind `python`, or behind `python -u worker.py script`.
        script, *arguments = plan.argv[1 if plan.elastic is None else 4 :]
        outputs.append(run_warm_script(script, processes, arguments, env=plan.environment))
        return 0

    with patch.dict(os.environ, launch_environment(), clear=True), patch("accelerate.launch.run", run_forked):
        yield outputs


def launch_warm(options: Sequence[str | Path], script: Path, arguments: Sequence[str] = ()) -> str:
    """Launch a script in processes forked from this one, and return what they wrote to stdout, in rank order."""
    words = [*map(str, options), str(script), *arguments]
    with forked_launches() as outputs:
        launch_program.launch_command(launch_program.launch_command_parser().parse_args(words))
    return outputs[0]


def launch_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment without the variables of another launcher or a configuration of this user."""
    around = script_environment({"HF_HOME": "does-not-exist", **(env or {})})
    ours = ("ACCELERATE_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")
    return {name: value for name, value in around.items() if name in (env or {}) or not name.startswith(ours)}
