"""Launch options of FSDP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate._base.constants import (
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accelerate.config.knob import INTEGER, NAMES, TEXT_OR_FLAG, YES_NO, Ask, Condition, knob, word_of
from accelerate.config.sections.launch_section import LaunchSection

# Older files number the strategies from 1.
_STRATEGY_NUMBERS = {str(number): name for number, name in enumerate(FSDP_SHARDING_STRATEGY, start=1)}


def _of_version(version: int) -> Condition:
    return lambda answers: bool(answers["fsdp_version"] == version)


def _wraps(policy: str) -> Condition:
    return lambda answers: bool(answers["fsdp_auto_wrap_policy"] == policy)


@dataclass
class FsdpOptions(LaunchSection):
    """How weights, gradients and optimizer states are sharded."""

    title: ClassVar[str] = "FSDP Arguments"
    file_key: ClassVar[str | None] = "fsdp_config"
    prefix: ClassVar[str] = "fsdp_"
    switch: ClassVar[str | None] = "use_fsdp"

    fsdp_version: int = knob(
        1, help="Generation of FSDP.", codec=INTEGER, choices=(1, 2), env="FSDP_VERSION", ask=Ask(default=2)
    )
    fsdp_offload_params: bool = knob(
        False,
        help="Keep weights and gradients on the CPU while they rest.",
        codec=YES_NO,
        env="FSDP_OFFLOAD_PARAMS",
        ask=Ask(),
    )
    fsdp_min_num_params: int = knob(
        100_000_000,
        help="Size of a module that is sharded on its own, under SIZE_BASED_WRAP.",
        codec=INTEGER,
        env="FSDP_MIN_NUM_PARAMS",
        ask=Ask(only_if=_wraps("SIZE_BASED_WRAP"), after="fsdp_auto_wrap_policy"),
    )
    fsdp_sharding_strategy: str = knob(
        "FULL_SHARD",
        help="What FSDP 1 shards.",
        codec=word_of(*FSDP_SHARDING_STRATEGY, upper=True, aliases=_STRATEGY_NUMBERS),
        choices=tuple(FSDP_SHARDING_STRATEGY),
        env="FSDP_SHARDING_STRATEGY",
        ask=Ask(only_if=_of_version(1)),
    )
    fsdp_reshard_after_forward: str = knob(
        "true",
        help="Free weights between forward and backward: true or false with FSDP 2, a sharding strategy with FSDP 1.",
        codec=TEXT_OR_FLAG,
        env="FSDP_RESHARD_AFTER_FORWARD",
        ask=Ask("Free weights between forward and backward", choices=("true", "false"), only_if=_of_version(2)),
    )
    fsdp_auto_wrap_policy: str | None = knob(
        help="Which modules are sharded on their own.",
        codec=word_of(*FSDP_AUTO_WRAP_POLICY, upper=True),
        choices=tuple(FSDP_AUTO_WRAP_POLICY),
        env="FSDP_AUTO_WRAP_POLICY",
        ask=Ask(default="TRANSFORMER_BASED_WRAP"),
    )
    fsdp_transformer_layer_cls_to_wrap: str | None = knob(
        help="Classes of the layers, between commas, under TRANSFORMER_BASED_WRAP.",
        codec=NAMES,
        env="FSDP_TRANSFORMER_CLS_TO_WRAP",
        ask=Ask(
            "Classes of the layers, between commas; empty takes those that the model names",
            optional=True,
            only_if=_wraps("TRANSFORMER_BASED_WRAP"),
        ),
    )
    fsdp_backward_prefetch: str | None = knob(
        help="When FSDP 1 fetches the next weights in backward.",
        codec=word_of(*FSDP_BACKWARD_PREFETCH, upper=True),
        choices=tuple(FSDP_BACKWARD_PREFETCH),
        env="FSDP_BACKWARD_PREFETCH",
        old_keys=("fsdp_backward_prefetch_policy",),
        ask=Ask(only_if=_of_version(1)),
    )
    fsdp_state_dict_type: str | None = knob(
        help="Form of the weights in checkpoints.",
        codec=word_of(*FSDP_STATE_DICT_TYPE, upper=True),
        choices=tuple(FSDP_STATE_DICT_TYPE),
        env="FSDP_STATE_DICT_TYPE",
        ask=Ask(default="SHARDED_STATE_DICT"),
    )
    fsdp_forward_prefetch: bool = knob(
        False,
        help="Fetch the next weights during forward.",
        codec=YES_NO,
        env="FSDP_FORWARD_PREFETCH",
        ask=Ask(only_if=_of_version(1)),
    )
    fsdp_use_orig_params: bool = knob(
        True,
        help="Let FSDP 1 show the parameters of the model as they were, so that they can differ in requires_grad.",
        codec=YES_NO,
        env="FSDP_USE_ORIG_PARAMS",
        ask=Ask(only_if=_of_version(1)),
    )
    fsdp_cpu_ram_efficient_loading: bool = knob(
        True,
        help="Let the first process of a machine alone read the checkpoint; needs --fsdp_sync_module_states.",
        codec=YES_NO,
        env="FSDP_CPU_RAM_EFFICIENT_LOADING",
        ask=Ask("Let the first process of a machine alone read the checkpoint"),
    )
    fsdp_sync_module_states: bool = knob(
        True,
        help="Send the weights of rank 0 to all at the start.",
        codec=YES_NO,
        env="FSDP_SYNC_MODULE_STATES",
        ask=Ask(only_if=lambda answers: answers["fsdp_version"] == 1 and not answers["fsdp_cpu_ram_efficient_loading"]),
    )
    fsdp_activation_checkpointing: bool = knob(
        False,
        help="Compute activations again in backward instead of keeping them.",
        codec=YES_NO,
        env="FSDP_ACTIVATION_CHECKPOINTING",
        ask=Ask(),
    )
    fsdp_activation_checkpointing_offload: bool = knob(
        False,
        help="Keep the activations that remain on the CPU.",
        codec=YES_NO,
        env="FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        ask=Ask(only_if=lambda answers: bool(answers["fsdp_activation_checkpointing"])),
    )
    fsdp_ignored_modules: str | None = knob(
        help="Pattern of the names of modules that are not sharded.", env="FSDP_IGNORED_MODULES", shape="none"
    )
