"""When a question of `accelerate config` applies, from the answers before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def several_processes(answers: Mapping[str, Any]) -> bool:
    """Say whether the run has more than one process."""
    return bool(answers["distributed_type"] != "NO")


def several_machines(answers: Mapping[str, Any]) -> bool:
    """Say whether the run has more than one machine."""
    return bool(answers["num_machines"] > 1)


def several_cpu_machines(answers: Mapping[str, Any]) -> bool:
    """Say whether the run is on the CPUs of several machines."""
    return several_machines(answers) and bool(answers["cpu"])


def machines_meet(answers: Mapping[str, Any]) -> bool:
    """Say whether machines must be told where to find each other."""
    return several_machines(answers) and not answers["mpirun_hostfile"]


def on_accelerators(answers: Mapping[str, Any]) -> bool:
    """Say whether the run has several accelerators of a machine."""
    return several_processes(answers) and not answers["cpu"] and not answers["tpu"]


def chooses_devices(answers: Mapping[str, Any]) -> bool:
    """Say whether a choice among the accelerators of this machine means anything."""
    return on_accelerators(answers) and not several_machines(answers)


def takes_axes(answers: Mapping[str, Any]) -> bool:
    """Say whether the engine of training can lay processes out on axes."""
    return bool(answers["use_deepspeed"] or (answers["use_fsdp"] and answers["fsdp_version"] == 2))
