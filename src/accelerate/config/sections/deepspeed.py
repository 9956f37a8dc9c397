"""Launch options of DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate._base.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate.config.knob import INTEGER, NAMES, NUMBER, YES_NO, knob, or_auto, shared, word_of
from accelerate.config.sections.launch_section import LaunchSection
from accelerate.config.sections.training import GradientAccumulationPlugin

_PLACES = ("none", "cpu", "nvme")
_PREFIX = "ACCELERATE_DEEPSPEED_"


@dataclass
class DeepSpeedOptions(LaunchSection):
    """ZeRO, offloading, and how DeepSpeed starts on several machines."""

    title: ClassVar[str] = "DeepSpeed Arguments"
    file_key: ClassVar[str | None] = "deepspeed_config"
    switch: ClassVar[str | None] = "use_deepspeed"

    deepspeed_config_file: str | None = knob(help="JSON file of DeepSpeed's own.", env=_PREFIX + "CONFIG_FILE")
    zero_stage: int | None = knob(help="How much ZeRO shards, 0 to 3.", codec=INTEGER, env=_PREFIX + "ZERO_STAGE")
    offload_optimizer_device: str | None = knob(
        help="Where optimizer states rest.",
        codec=word_of(*_PLACES),
        choices=_PLACES,
        env=_PREFIX + "OFFLOAD_OPTIMIZER_DEVICE",
    )
    offload_param_device: str | None = knob(
        help="Where weights rest.", codec=word_of(*_PLACES), choices=_PLACES, env=_PREFIX + "OFFLOAD_PARAM_DEVICE"
    )
    offload_optimizer_nvme_path: str | None = knob(
        help="Folder on an NVMe disk for optimizer states.", env=_PREFIX + "OFFLOAD_OPTIMIZER_NVME_PATH"
    )
    offload_param_nvme_path: str | None = knob(
        help="Folder on an NVMe disk for weights.", env=_PREFIX + "OFFLOAD_PARAM_NVME_PATH"
    )
    gradient_accumulation_steps: int | None = shared(GradientAccumulationPlugin, "num_steps")
    gradient_clipping: float | None = knob(
        help="Norm that gradients are clipped to.", codec=or_auto(NUMBER), env="ACCELERATE_GRADIENT_CLIPPING"
    )
    zero3_init_flag: bool | None = knob(
        help="Build models in shards, with ZeRO 3.", codec=YES_NO, env=_PREFIX + "ZERO3_INIT"
    )
    zero3_save_16bit_model: bool | None = knob(
        help="Save whole weights in 16 bits, with ZeRO 3.", codec=YES_NO, env=_PREFIX + "ZERO3_SAVE_16BIT_MODEL"
    )
    deepspeed_hostfile: str | None = knob(help="File that lists the machines.", reader="launcher")
    deepspeed_exclusion_filter: str | None = knob(help="Machines and devices to leave out.", reader="launcher")
    deepspeed_inclusion_filter: str | None = knob(help="Machines and devices to use.", reader="launcher")
    deepspeed_multinode_launcher: str | None = knob(
        help="How processes start on other machines; `standard` starts them here alone.",
        codec=word_of(*DEEPSPEED_MULTINODE_LAUNCHERS),
        choices=tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
        reader="launcher",
    )
    deepspeed_moe_layer_cls_names: str | None = knob(
        help="Classes of mixture-of-experts layers, between commas.",
        codec=NAMES,
        env=_PREFIX + "MOE_LAYER_CLS_NAMES",
    )
