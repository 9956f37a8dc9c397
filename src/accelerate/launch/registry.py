"""The launchers in the order in which they are asked; the first that accepts makes the plan."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

from accelerate._base.helpers import Choice
from accelerate.launch import deepspeed, elastic, mpi, simple, slurm, tpu
from accelerate.launch.command import check_script
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig


class Launcher(Protocol):
    """What a file of this folder offers to be asked."""

    name: str

    def accepts(self, config: RunConfig, site: Site) -> Choice[bool]:
        """Say whether this launcher starts such a run, and why."""

    def plan(self, config: RunConfig, site: Site) -> LaunchPlan:
        """Decide everything without starting anything."""


_MODULES: tuple[ModuleType, ...] = (tpu, slurm, mpi, deepspeed, elastic, simple)
LAUNCHERS: tuple[Launcher, ...] = tuple(cast(Launcher, module) for module in _MODULES)


def choose(config: RunConfig, site: Site) -> Choice[Launcher]:
    """Return the launcher for a configuration and why it was taken."""
    for launcher in LAUNCHERS:
        answer = launcher.accepts(config, site)
        if answer.value:
            return Choice(launcher, answer.reason)
    raise AssertionError("the last launcher accepts everything")


def make_plan(config: RunConfig, site: Site) -> LaunchPlan:
    """Check the script and return the plan of the first launcher that accepts.

    Raises:
        ConfigurationError: If the run cannot be started as it was asked for.
    """
    check_script(config, site)
    plan = choose(config, site).value.plan(config, site)
    return replace(plan, quiet=bool(config["quiet"]))
