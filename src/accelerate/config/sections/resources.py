"""Launch options that say how many processes run and with what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import INTEGER, ON_ONE, THREADS, Ask, knob, word_of
from accelerate.config.sections.asking import on_accelerators, several_processes
from accelerate.config.sections.launch_section import LaunchSection

PRECISIONS = ("no", "fp16", "bf16", "fp8")


@dataclass
class ResourceOptions(LaunchSection):
    """Number of processes, threads and bits."""

    title: ClassVar[str] = "Resource Selection Arguments"

    mixed_precision: str | None = knob(
        help="Number format of training.",
        codec=word_of(*PRECISIONS),
        choices=PRECISIONS,
        env="ACCELERATE_MIXED_PRECISION",
        fallback="no",
        ask=Ask(),
    )
    num_processes: int | None = knob(
        help="Number of processes over all machines; one for each accelerator where it is not given.",
        codec=INTEGER,
        reader="elastic",
        ask=Ask("Number of processes over all machines", only_if=several_processes),
    )
    num_machines: int | None = knob(
        help="Number of machines.",
        codec=INTEGER,
        fallback=1,
        reader="elastic",
        ask=Ask(only_if=lambda answers: several_processes(answers) and not answers["tpu"]),
    )
    num_cpu_threads_per_process: int | None = knob(
        help="Threads of each process; on the CPU the physical cores are shared out where it is not given.",
        codec=THREADS,
        env="OMP_NUM_THREADS",
        yaml="",
    )
    enable_cpu_affinity: bool = knob(
        False,
        help="Bind each process to the cores next to its accelerator.",
        codec=ON_ONE,
        env="ACCELERATE_CPU_AFFINITY",
        shape="switch",
        ask=Ask(only_if=on_accelerators),
    )
