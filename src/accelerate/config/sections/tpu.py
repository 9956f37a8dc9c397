"""Launch options of TPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import ON_TRUE, REPEATED, YES_NO, knob
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class TpuOptions(LaunchSection):
    """A TPU, or a pod of them."""

    title: ClassVar[str] = "TPU"

    tpu_cluster: bool = knob(
        False,
        help="Start the script on every machine of a TPU pod.",
        codec=YES_NO,
        shape="switch",
        negative="no_tpu_cluster",
        yaml="tpu_use_cluster",
        old_keys=("tpu_cluster",),
        reader="launcher",
    )
    tpu_use_sudo: bool = knob(
        False, help="Run with sudo on the machines of the pod.", codec=YES_NO, shape="switch", reader="launcher"
    )
    vm: list[str] | None = knob(
        help="A machine of the pod; repeat it for each.",
        codec=REPEATED,
        shape="repeat",
        yaml="tpu_vm",
        reader="launcher",
    )
    env: list[str] | None = knob(
        help="A variable for the machines of the pod, as `NAME=value`; repeat it for each.",
        codec=REPEATED,
        shape="repeat",
        yaml="tpu_env",
        reader="launcher",
    )
    main_training_function: str | None = knob(
        help="Function of the script to run in each process of a TPU.", fallback="main", reader="launcher"
    )
    downcast_bf16: bool = knob(
        False,
        help="With bf16 on a TPU, keep doubles in 32 bits instead of 16.",
        codec=ON_TRUE,
        env="ACCELERATE_DOWNCAST_BF16",
        shape="switch",
    )
    tpu_name: str | None = knob(help="Name of the TPU.", shape="none", reader="launcher")
    tpu_zone: str | None = knob(help="Zone of the TPU.", shape="none", reader="launcher")
    command_file: str | None = knob(help="File of commands for `tpu-config`.", shape="none", reader="launcher")
    commands: list[str] | None = knob(
        help="Commands for `tpu-config`.", codec=REPEATED, shape="none", reader="launcher"
    )
