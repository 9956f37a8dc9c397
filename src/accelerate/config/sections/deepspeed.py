"""Launch options of DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate._base.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.config.knob import INTEGER, NAMES, NUMBER, YES_NO, Ask, Condition, knob, or_auto, shared, word_of
from accelerate.config.sections.asking import several_machines
from accelerate.config.sections.launch_section import LaunchSection
from accelerate.config.sections.training import GradientAccumulationPlugin

_PLACES = ("none", "cpu", "nvme")
_PREFIX = "ACCELERATE_DEEPSPEED_"


def _without_file(answers: Mapping[str, Any]) -> bool:
    return not answers["deepspeed_config_file"]


def _from_stage(stage: int) -> Condition:
    return lambda answers: _without_file(answers) and answers["zero_stage"] >= stage


def _starts_others(answers: Mapping[str, Any]) -> bool:
    return several_machines(answers) and answers["deepspeed_multinode_launcher"] != "standard"


@dataclass
class DeepSpeedOptions(LaunchSection):
    """ZeRO, offloading, and how DeepSpeed starts on several machines."""

    title: ClassVar[str] = "DeepSpeed Arguments"
    file_key: ClassVar[str | None] = "deepspeed_config"
    switch: ClassVar[str | None] = "use_deepspeed"

    deepspeed_config_file: str | None = knob(
        help="JSON file of DeepSpeed's own.",
        env=_PREFIX + "CONFIG_FILE",
        ask=Ask("JSON file of DeepSpeed's own; empty asks for its options here", optional=True),
    )
    zero_stage: int | None = knob(
        help="How much ZeRO shards, 0 to 3.",
        codec=INTEGER,
        env=_PREFIX + "ZERO_STAGE",
        ask=Ask("How much ZeRO shards", choices=(0, 1, 2, 3), default=2, only_if=_without_file),
    )
    offload_optimizer_device: str | None = knob(
        help="Where optimizer states rest.",
        codec=word_of(*_PLACES),
        choices=_PLACES,
        env=_PREFIX + "OFFLOAD_OPTIMIZER_DEVICE",
        ask=Ask(only_if=_from_stage(2)),
    )
    offload_param_device: str | None = knob(
        help="Where weights rest.",
        codec=word_of(*_PLACES),
        choices=_PLACES,
        env=_PREFIX + "OFFLOAD_PARAM_DEVICE",
        ask=Ask(only_if=_from_stage(3)),
    )
    offload_optimizer_nvme_path: str | None = knob(
        help="Folder on an NVMe disk for optimizer states.",
        env=_PREFIX + "OFFLOAD_OPTIMIZER_NVME_PATH",
        ask=Ask(only_if=lambda answers: answers["offload_optimizer_device"] == "nvme"),
    )
    offload_param_nvme_path: str | None = knob(
        help="Folder on an NVMe disk for weights.",
        env=_PREFIX + "OFFLOAD_PARAM_NVME_PATH",
        ask=Ask(only_if=lambda answers: answers["offload_param_device"] == "nvme"),
    )
    gradient_accumulation_steps: int | None = shared(
        GradientAccumulationPlugin,
        "num_steps",
        ask=Ask("Steps that gradients are accumulated over", default=1, only_if=_without_file),
    )
    gradient_clipping: float | None = knob(
        help="Norm that gradients are clipped to.",
        codec=or_auto(NUMBER),
        env="ACCELERATE_GRADIENT_CLIPPING",
        ask=Ask(optional=True, only_if=_without_file),
    )
    zero3_init_flag: bool | None = knob(
        help="Build models in shards, with ZeRO 3.",
        codec=YES_NO,
        env=_PREFIX + "ZERO3_INIT",
        ask=Ask(only_if=_from_stage(3)),
    )
    zero3_save_16bit_model: bool | None = knob(
        help="Save whole weights in 16 bits, with ZeRO 3.",
        codec=YES_NO,
        env=_PREFIX + "ZERO3_SAVE_16BIT_MODEL",
        ask=Ask(only_if=_from_stage(3)),
    )
    deepspeed_hostfile: str | None = knob(
        help="File that lists the machines.",
        reader="launcher",
        ask=Ask(optional=True, only_if=_starts_others, after="deepspeed_multinode_launcher"),
    )
    deepspeed_exclusion_filter: str | None = knob(
        help="Machines and devices to leave out.",
        reader="launcher",
        ask=Ask(optional=True, only_if=_starts_others, after="deepspeed_hostfile"),
    )
    deepspeed_inclusion_filter: str | None = knob(
        help="Machines and devices to use.",
        reader="launcher",
        ask=Ask(
            optional=True,
            only_if=lambda answers: _starts_others(answers) and not answers["deepspeed_exclusion_filter"],
            after="deepspeed_exclusion_filter",
        ),
    )
    deepspeed_multinode_launcher: str | None = knob(
        help="How processes start on other machines; `standard` starts them here alone.",
        codec=word_of(*DEEPSPEED_MULTINODE_LAUNCHERS),
        choices=tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
        reader="launcher",
        ask=Ask(default="standard", only_if=several_machines),
    )
    deepspeed_moe_layer_cls_names: str | None = knob(
        help="Classes of mixture-of-experts layers, between commas.",
        codec=NAMES,
        env=_PREFIX + "MOE_LAYER_CLS_NAMES",
        ask=Ask(optional=True, only_if=_without_file),
    )
