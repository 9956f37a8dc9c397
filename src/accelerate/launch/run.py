"""Carry out a plan and return the exit code of the run."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from accelerate._base.errors import ConfigurationError
from accelerate.config import env
from accelerate.launch.plan import LaunchPlan


def run(plan: LaunchPlan, *, in_place: bool = False) -> int:
    """Start what a plan says and wait for it.

    Args:
        in_place: Let a single process take the place of this one: then this function does not return.

    Raises:
        ConfigurationError: If the program of the plan cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if plan.mode == "exec" and in_place and os.name == "posix":
        _take_place(plan)
    # What watches other processes is not loaded where the script takes the place of this one.
    from accelerate.launch.watch import watch

    return watch(plan)


def _take_place(plan: LaunchPlan) -> NoReturn:
    try:
        os.execvpe(plan.argv[0], list(plan.argv), {**env.items(), **plan.environment})
    except OSError as error:
        raise cannot_start(plan.argv[0], error) from error


def cannot_start(program: str, error: OSError) -> ConfigurationError:
    """Make the error for a program that the system refuses to start."""
    return ConfigurationError(
        f"The program {program!r} cannot be started: {error.strerror}. Install it or put it on the PATH; "
        "--explain shows the whole command."
    )
