"""Launch options of TPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate.config.knob import ON_TRUE, REPEATED, YES_NO, Ask, knob
from accelerate.config.sections.launch_section import LaunchSection


def _on_tpu(answers: Mapping[str, Any]) -> bool:
    return bool(answers["tpu"])


def _pod(answers: Mapping[str, Any]) -> bool:
    return _on_tpu(answers) and bool(answers["tpu_cluster"])


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
        ask=Ask(only_if=_on_tpu),
    )
    tpu_use_sudo: bool = knob(
        False,
        help="Run with sudo on the machines of the pod.",
        codec=YES_NO,
        shape="switch",
        reader="launcher",
        ask=Ask(only_if=_pod),
    )
    vm: list[str] | None = knob(
        help="A machine of the pod; repeat it for each.",
        codec=REPEATED,
        shape="repeat",
        yaml="tpu_vm",
        reader="launcher",
        ask=Ask("Machine of the pod, or a JSON list of them", optional=True, only_if=_pod),
    )
    env: list[str] | None = knob(
        help="A variable for the machines of the pod, as `NAME=value`; repeat it for each.",
        codec=REPEATED,
        shape="repeat",
        yaml="tpu_env",
        reader="launcher",
        ask=Ask(
            "Variable for the machines of the pod as `NAME=value`, or a JSON list of them", optional=True, only_if=_pod
        ),
    )
    main_training_function: str | None = knob(
        help="Function of the script to run in each process of a TPU.",
        fallback="main",
        reader="launcher",
        ask=Ask(only_if=_on_tpu),
    )
    downcast_bf16: bool = knob(
        False,
        help="With bf16 on a TPU, keep doubles in 32 bits instead of 16.",
        codec=ON_TRUE,
        env="ACCELERATE_DOWNCAST_BF16",
        shape="switch",
        ask=Ask(only_if=lambda answers: _on_tpu(answers) and answers["mixed_precision"] == "bf16"),
    )
    tpu_name: str | None = knob(help="Name of the TPU.", shape="none", reader="launcher", ask=Ask(only_if=_pod))
    tpu_zone: str | None = knob(help="Zone of the TPU.", shape="none", reader="launcher", ask=Ask(only_if=_pod))
    command_file: str | None = knob(
        help="File of commands for `tpu-config`.", shape="none", reader="launcher", ask=Ask(optional=True, only_if=_pod)
    )
    commands: list[str] | None = knob(
        help="Commands for `tpu-config`.",
        codec=REPEATED,
        shape="none",
        reader="launcher",
        ask=Ask(
            "Command for `tpu-config`, or a JSON list of them",
            optional=True,
            only_if=lambda answers: _pod(answers) and not answers["command_file"],
        ),
    )
