"""Launch options that choose the engine of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import ON_TRUE, Ask, knob
from accelerate.config.sections.asking import takes_axes
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class ParadigmOptions(LaunchSection):
    """Which engine wraps the model; one at most."""

    title: ClassVar[str] = "Training Paradigm Arguments"

    use_deepspeed: bool = knob(
        False,
        help="Train with DeepSpeed.",
        codec=ON_TRUE,
        env="ACCELERATE_USE_DEEPSPEED",
        shape="switch",
        yaml="",
    )
    use_fsdp: bool = knob(
        False,
        help="Shard the model with FSDP.",
        codec=ON_TRUE,
        env="ACCELERATE_USE_FSDP",
        shape="switch",
        yaml="",
    )
    use_parallelism_config: bool = knob(
        False,
        help="Lay the processes out on the axes given by --parallelism_config_*; those that shard need FSDP 2 or DeepSpeed.",
        codec=ON_TRUE,
        env="ACCELERATE_USE_PARALLELISM_CONFIG",
        shape="switch",
        yaml="",
        ask=Ask("Lay the processes out on several axes of parallelism", only_if=takes_axes),
    )
    use_megatron_lm: bool = knob(
        False,
        help="Train with Megatron-LM.",
        codec=ON_TRUE,
        env="ACCELERATE_USE_MEGATRON_LM",
        shape="switch",
        yaml="",
    )
