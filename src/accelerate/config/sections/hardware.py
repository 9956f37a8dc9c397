"""Launch options that choose the kind of hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import TRUE_FALSE, YES_NO, Ask, knob
from accelerate.config.sections.asking import several_processes
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class HardwareOptions(LaunchSection):
    """What the processes compute on."""

    title: ClassVar[str] = "Hardware Selection Arguments"

    cpu: bool = knob(
        False,
        help="Compute on the CPU even if there is an accelerator. The default file is not read then.",
        codec=TRUE_FALSE,
        env="ACCELERATE_USE_CPU",
        shape="switch",
        yaml="use_cpu",
        ask=Ask("Compute on the CPU alone", only_if=lambda answers: not several_processes(answers)),
    )
    multi_gpu: bool = knob(
        False,
        help="Start one process for each of several accelerators.",
        codec=YES_NO,
        shape="switch",
        yaml="",
        reader="launcher",
    )
    tpu: bool = knob(False, help="Start the script on a TPU.", codec=YES_NO, shape="switch", yaml="", reader="launcher")
