"""Launch options of MPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import Ask, knob
from accelerate.config.sections.asking import several_cpu_machines
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class MpiOptions(LaunchSection):
    """Start through `mpirun`."""

    title: ClassVar[str] = "MPI Arguments"
    file_key: ClassVar[str | None] = "mpirun_config"
    prefix: ClassVar[str] = "mpirun_"

    mpirun_hostfile: str | None = knob(
        help="Start with mpirun on the machines that this file lists.",
        reader="launcher",
        ask=Ask("File of machines to start on with mpirun", optional=True, only_if=several_cpu_machines),
    )
