"""Launch options of the engines that shard a model: DeepSpeed, FSDP, Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from accelerate._base.constants import (
    DEEPSPEED_MULTINODE_LAUNCHERS,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_BACKWARD_PREFETCH,
    FSDP_SHARDING_STRATEGY,
    FSDP_STATE_DICT_TYPE,
)
from accelerate.config.knob import (
    JSON_OBJECT,
    NAMES,
    NUMBER,
    TEXT_OR_FLAG,
    TRUE_FALSE,
    Ask,
    Condition,
    LaunchSection,
    knob,
    or_auto,
    word_of,
)
from accelerate.config.sections.launch import several_machines

# These of DeepSpeed's launchers start the processes of machines that a hostfile names.
_BY_HOSTFILE = ("pdsh", "openmpi", "mvapich", "mpich")
_OFFLOAD_DEVICES = ("none", "cpu", "nvme")
# Older files number the strategies from 1.
_STRATEGY_NUMBERS = {str(number): name for number, name in enumerate(FSDP_SHARDING_STRATEGY, start=1)}


def _without_file(answers: Mapping[str, Any]) -> bool:
    return not answers["deepspeed_config_file"]


def _from_stage(stage: int) -> Condition:
    return lambda answers: _without_file(answers) and answers["zero_stage"] >= stage


def _needs_hostfile(answers: Mapping[str, Any]) -> bool:
    return several_machines(answers) and answers["deepspeed_multinode_launcher"] in _BY_HOSTFILE


def started_by_hand(answers: Mapping[str, Any]) -> bool:
    """Say whether somebody starts each machine, so that each must know the first one and its own place."""
    return answers["deepspeed_multinode_launcher"] in (None, "standard", "nossh")


def meets_by_torch(answers: Mapping[str, Any]) -> bool:
    """Say whether torch's agents of the machines find each other."""
    return answers["deepspeed_multinode_launcher"] in (None, "standard")


def _of_version(version: int) -> Condition:
    return lambda answers: bool(answers["fsdp_version"] == version)


def _wraps(policy: str) -> Condition:
    return lambda answers: bool(answers["fsdp_auto_wrap_policy"] == policy)


class DeepSpeedOptions(LaunchSection):
    """ZeRO, offloading, and how DeepSpeed starts on several machines."""

    title: ClassVar[str] = "DeepSpeed Arguments"
    file_key: ClassVar[str | None] = "deepspeed_config"
    switch: ClassVar[str | None] = "use_deepspeed"
    variables: ClassVar[str | None] = "ACCELERATE_DEEPSPEED_"
    rest: ClassVar[str | None] = "deepspeed_entries"

    @classmethod
    def rest_keys(cls) -> tuple[str, ...]:
        """Return the entries of DeepSpeed's own configuration."""
        from accelerate.config.deepspeed_rules import ENTRIES  # few files have such keys

        return ENTRIES

    deepspeed_config_file: str | None = knob(
        help="JSON file of DeepSpeed's own.",
        env="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        ask=Ask("JSON file of DeepSpeed's own; empty asks for its options here", optional=True),
    )
    zero_stage: int | None = knob(
        help="How much ZeRO shards, 0 to 3.",
        ask=Ask("How much ZeRO shards", choices=(0, 1, 2, 3), default=2, only_if=_without_file),
    )
    offload_optimizer_device: str | None = knob(
        help="Where optimizer states rest.", choices=_OFFLOAD_DEVICES, ask=Ask(only_if=_from_stage(2))
    )
    offload_param_device: str | None = knob(
        help="Where weights rest.", choices=_OFFLOAD_DEVICES, ask=Ask(only_if=_from_stage(3))
    )
    offload_optimizer_nvme_path: str | None = knob(
        help="Folder on an NVMe disk for optimizer states.",
        ask=Ask(only_if=lambda answers: answers["offload_optimizer_device"] == "nvme"),
    )
    offload_param_nvme_path: str | None = knob(
        help="Folder on an NVMe disk for weights.",
        ask=Ask(only_if=lambda answers: answers["offload_param_device"] == "nvme"),
    )
    gradient_accumulation_steps: int | None = knob(
        help="Number of batches whose gradients DeepSpeed sums before the optimizer steps.",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        engine_only=True,
        idle=" without DeepSpeed. Write Accelerator(gradient_accumulation_steps={}) in the script.",
        ask=Ask("Steps that gradients are accumulated over", default=1, only_if=_without_file),
    )
    gradient_clipping: float | None = knob(
        help="Norm that gradients are clipped to.",
        codec=or_auto(NUMBER),
        env="ACCELERATE_GRADIENT_CLIPPING",
        ask=Ask(optional=True, only_if=_without_file),
    )
    zero3_init_flag: bool | None = knob(
        help="Build models in shards; only ZeRO 3 can, and it does unless told otherwise.",
        env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        ask=Ask("Build models in shards", only_if=_from_stage(3)),
    )
    zero3_save_16bit_model: bool | None = knob(
        help="Save whole weights in 16 bits, with ZeRO 3.", ask=Ask(only_if=_from_stage(3))
    )
    deepspeed_hostfile: str | None = knob(
        help="File that lists the machines, with a line such as `worker-1 slots=8` for each.",
        reader="launcher",
        ask=Ask(only_if=_needs_hostfile),
    )
    deepspeed_exclusion_filter: str | None = knob(
        help="Machines of the hostfile and their slots to leave out, such as `worker-1@worker-2:0,2`.",
        reader="launcher",
        ask=Ask(optional=True, only_if=_needs_hostfile),
    )
    deepspeed_inclusion_filter: str | None = knob(
        help="Machines of the hostfile and their slots to use, such as `worker-1@worker-2:0,2`; without it all.",
        reader="launcher",
        ask=Ask(
            optional=True,
            only_if=lambda answers: _needs_hostfile(answers) and not answers["deepspeed_exclusion_filter"],
        ),
    )
    deepspeed_multinode_launcher: str | None = knob(
        help="How processes start on other machines: by pdsh, which a hostfile makes the default, by an MPI, by Slurm, or by "
        "hand on each machine, under torch's agent (`standard`) or DeepSpeed's launcher (`nossh`).",
        choices=tuple(DEEPSPEED_MULTINODE_LAUNCHERS),
        reader="launcher",
        ask=Ask("How processes start on other machines", default="standard", only_if=several_machines),
    )
    deepspeed_moe_layer_cls_names: str | None = knob(
        help="Classes of mixture-of-experts layers, between commas.",
        codec=NAMES,
        env="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        ask=Ask(optional=True, only_if=_without_file),
    )
    deepspeed_entries: dict[str, Any] | None = knob(
        help="Further entries of DeepSpeed's own configuration, as JSON; a file may hold each under its own key.",
        codec=JSON_OBJECT,
        env="ACCELERATE_DEEPSPEED_ENTRIES",
        shape="none",
    )


class FsdpOptions(LaunchSection):
    """How weights, gradients and optimizer states are sharded."""

    title: ClassVar[str] = "FSDP Arguments"
    file_key: ClassVar[str | None] = "fsdp_config"
    prefix: ClassVar[str] = "fsdp_"
    switch: ClassVar[str | None] = "use_fsdp"
    variables: ClassVar[str | None] = ""

    fsdp_version: int = knob(1, help="Generation of FSDP.", choices=(1, 2), ask=Ask(default=2))
    fsdp_offload_params: bool = knob(False, help="Keep weights and gradients on the CPU while they rest.", ask=Ask())
    fsdp_min_num_params: int = knob(
        100_000_000,
        help="Size of a module that is sharded on its own, under SIZE_BASED_WRAP.",
        ask=Ask(only_if=_wraps("SIZE_BASED_WRAP"), after="fsdp_auto_wrap_policy"),
    )
    fsdp_sharding_strategy: str = knob(
        "FULL_SHARD",
        help="What FSDP 1 shards.",
        codec=word_of(*FSDP_SHARDING_STRATEGY, aliases=_STRATEGY_NUMBERS),
        choices=tuple(FSDP_SHARDING_STRATEGY),
        ask=Ask(only_if=_of_version(1)),
    )
    fsdp_reshard_after_forward: str = knob(
        "true",
        help="Free weights between forward and backward: true or false with FSDP 2, a sharding strategy with FSDP 1.",
        codec=TEXT_OR_FLAG,
        ask=Ask("Free weights between forward and backward", choices=("true", "false"), only_if=_of_version(2)),
    )
    fsdp_auto_wrap_policy: str | None = knob(
        help="Which modules are sharded on their own.",
        choices=tuple(FSDP_AUTO_WRAP_POLICY),
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
        choices=tuple(FSDP_BACKWARD_PREFETCH),
        old_keys=("fsdp_backward_prefetch_policy",),
        ask=Ask(only_if=_of_version(1)),
    )
    fsdp_state_dict_type: str | None = knob(
        help="Form of the weights in checkpoints; full with FSDP 1 and sharded with FSDP 2, where it is not given.",
        choices=tuple(FSDP_STATE_DICT_TYPE),
        ask=Ask("Form of the weights in checkpoints", default="SHARDED_STATE_DICT"),
    )
    fsdp_forward_prefetch: bool = knob(
        False,
        help="Let FSDP 1 fetch the next weights during forward.",
        ask=Ask("Fetch the next weights during forward", only_if=_of_version(1)),
    )
    fsdp_use_orig_params: bool = knob(
        True,
        help="Let FSDP 1 show the parameters of the model as they were, so that they can differ in requires_grad.",
        ask=Ask(only_if=_of_version(1)),
    )
    fsdp_cpu_ram_efficient_loading: bool = knob(
        True,
        help="Let the first process of a machine alone read the checkpoint; needs --fsdp_sync_module_states.",
        ask=Ask("Let the first process of a machine alone read the checkpoint"),
    )
    fsdp_sync_module_states: bool = knob(
        True,
        help="Let FSDP 1 send the weights of rank 0 to all at the start.",
        ask=Ask(
            "Send the weights of rank 0 to all at the start",
            only_if=lambda answers: answers["fsdp_version"] == 1 and not answers["fsdp_cpu_ram_efficient_loading"],
        ),
    )
    fsdp_activation_checkpointing: bool = knob(
        False, help="Compute activations again in backward instead of keeping them.", ask=Ask()
    )
    fsdp_activation_checkpointing_offload: bool = knob(
        False,
        help="Keep the activations that remain on the CPU; FSDP 2 only.",
        ask=Ask(
            "Keep the activations that remain on the CPU",
            only_if=lambda answers: bool(answers["fsdp_activation_checkpointing"]),
        ),
    )
    fsdp_ignored_modules: str | None = knob(help="Pattern of the names of modules that are not sharded.", shape="none")


class MegatronOptions(LaunchSection):
    """Degrees of parallelism and the engine's own training options."""

    title: ClassVar[str] = "Megatron-LM Arguments"
    file_key: ClassVar[str | None] = "megatron_lm_config"
    prefix: ClassVar[str] = "megatron_lm_"
    switch: ClassVar[str | None] = "use_megatron_lm"
    variables: ClassVar[str | None] = ""

    megatron_lm_tp_degree: int = knob(1, help="Processes that split each layer.", ask=Ask())
    megatron_lm_use_custom_fsdp: bool = knob(False, help="Megatron's own FSDP, which is refused.", codec=TRUE_FALSE)
    megatron_lm_no_load_optim: bool = knob(
        False, help="Leave the optimizer out when a checkpoint is loaded.", codec=TRUE_FALSE
    )
    megatron_lm_eod_mask_loss: bool = knob(
        False, help="Leave tokens at the end of a document out of the loss.", codec=TRUE_FALSE
    )
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = knob(
        False, help="Copy between CPU and device while the optimizer on the CPU computes.", codec=TRUE_FALSE
    )
    megatron_lm_no_save_optim: bool = knob(False, help="Leave the optimizer out of checkpoints.", codec=TRUE_FALSE)
    megatron_lm_optimizer_cpu_offload: bool = knob(False, help="Run the optimizer on the CPU.", codec=TRUE_FALSE)
    megatron_lm_use_precision_aware_optimizer: bool = knob(
        False, help="Keep optimizer states in lower precision.", codec=TRUE_FALSE
    )
    megatron_lm_decoder_last_pipeline_num_layers: int | None = knob(
        help="Layers in the last stage of the decoder's pipeline."
    )
    megatron_lm_pp_degree: int = knob(1, help="Stages of the pipeline.", ask=Ask())
    megatron_lm_num_micro_batches: int | None = knob(
        help="Parts of a batch that go through the pipeline one by one.",
        ask=Ask(default=1, only_if=lambda answers: answers["megatron_lm_pp_degree"] > 1),
    )
    megatron_lm_sequence_parallelism: bool | None = knob(
        help="Split sequences where layers are not split.",
        ask=Ask(default=True, only_if=lambda answers: answers["megatron_lm_tp_degree"] > 1),
    )
    megatron_lm_recompute_activations: bool | None = knob(
        help="Compute chosen activations again in backward.", ask=Ask(default=True)
    )
    megatron_lm_use_distributed_optimizer: bool | None = knob(
        help="Shard optimizer states over the replicas.", ask=Ask(default=True)
    )
    megatron_lm_gradient_clipping: float = knob(
        1.0, help="Norm that gradients are clipped to; 0 clips nothing.", ask=Ask()
    )
    megatron_lm_recompute_granularity: str | None = knob(
        help="How much is computed again.", choices=("full", "selective")
    )
    megatron_lm_recompute_method: str | None = knob(
        help="Which layers are computed again.", choices=("uniform", "block")
    )
    megatron_lm_recompute_num_layers: int | None = knob(help="Number of layers that are computed again together.")
    megatron_lm_attention_backend: str | None = knob(help="Choice of the attention kernel.", codec=TEXT_OR_FLAG)
    megatron_lm_expert_model_parallel_size: int | None = knob(help="Processes that share the experts.")
    megatron_lm_context_parallel_size: int | None = knob(help="Processes that split each sequence.")
    megatron_lm_attention_dropout: float | None = knob(help="Dropout of attention.")
    megatron_lm_hidden_dropout: float | None = knob(help="Dropout of hidden states.")
    megatron_lm_attention_softmax_in_fp32: bool | None = knob(help="Compute the softmax of attention in 32 bits.")
    megatron_lm_expert_tensor_parallel_size: int | None = knob(help="Processes that split each expert.")
    megatron_lm_calculate_per_token_loss: bool | None = knob(help="Divide the loss by tokens instead of by samples.")
    megatron_lm_use_rotary_position_embeddings: bool | None = knob(help="Use rotary position embeddings.")
