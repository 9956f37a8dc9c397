"""Launch options of Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import INTEGER, NUMBER, TEXT_OR_FLAG, TRUE_FALSE, YES_NO, Ask, knob, word_of
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class MegatronOptions(LaunchSection):
    """Degrees of parallelism and the engine's own training options."""

    title: ClassVar[str] = "Megatron-LM Arguments"
    file_key: ClassVar[str | None] = "megatron_lm_config"
    prefix: ClassVar[str] = "megatron_lm_"
    switch: ClassVar[str | None] = "use_megatron_lm"

    megatron_lm_tp_degree: int = knob(
        1, help="Processes that split each layer.", codec=INTEGER, env="MEGATRON_LM_TP_DEGREE", ask=Ask()
    )
    megatron_lm_use_custom_fsdp: bool = knob(
        False, help="Shard with Megatron's own FSDP.", codec=TRUE_FALSE, env="MEGATRON_LM_USE_CUSTOM_FSDP"
    )
    megatron_lm_no_load_optim: bool = knob(
        False,
        help="Leave the optimizer out when a checkpoint is loaded.",
        codec=TRUE_FALSE,
        env="MEGATRON_LM_NO_LOAD_OPTIM",
    )
    megatron_lm_eod_mask_loss: bool = knob(
        False,
        help="Leave tokens at the end of a document out of the loss.",
        codec=TRUE_FALSE,
        env="MEGATRON_LM_EOD_MASK_LOSS",
    )
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = knob(
        False,
        help="Copy between CPU and device while the optimizer on the CPU computes.",
        codec=TRUE_FALSE,
        env="MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D",
    )
    megatron_lm_no_save_optim: bool = knob(
        False, help="Leave the optimizer out of checkpoints.", codec=TRUE_FALSE, env="MEGATRON_LM_NO_SAVE_OPTIM"
    )
    megatron_lm_optimizer_cpu_offload: bool = knob(
        False, help="Run the optimizer on the CPU.", codec=TRUE_FALSE, env="MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD"
    )
    megatron_lm_use_precision_aware_optimizer: bool = knob(
        False,
        help="Keep optimizer states in lower precision.",
        codec=TRUE_FALSE,
        env="MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER",
    )
    megatron_lm_decoder_last_pipeline_num_layers: int | None = knob(
        help="Layers in the last stage of the decoder's pipeline.",
        codec=INTEGER,
        env="MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS",
    )
    megatron_lm_pp_degree: int = knob(
        1, help="Stages of the pipeline.", codec=INTEGER, env="MEGATRON_LM_PP_DEGREE", ask=Ask()
    )
    megatron_lm_num_micro_batches: int | None = knob(
        help="Parts of a batch that go through the pipeline one by one.",
        codec=INTEGER,
        env="MEGATRON_LM_NUM_MICRO_BATCHES",
        ask=Ask(default=1, only_if=lambda answers: answers["megatron_lm_pp_degree"] > 1),
    )
    megatron_lm_sequence_parallelism: bool | None = knob(
        help="Split sequences where layers are not split.",
        codec=YES_NO,
        env="MEGATRON_LM_SEQUENCE_PARALLELISM",
        ask=Ask(default=True, only_if=lambda answers: answers["megatron_lm_tp_degree"] > 1),
    )
    megatron_lm_recompute_activations: bool | None = knob(
        help="Compute chosen activations again in backward.",
        codec=YES_NO,
        env="MEGATRON_LM_RECOMPUTE_ACTIVATIONS",
        ask=Ask(default=True),
    )
    megatron_lm_use_distributed_optimizer: bool | None = knob(
        help="Shard optimizer states over the replicas.",
        codec=YES_NO,
        env="MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER",
        ask=Ask(default=True),
    )
    megatron_lm_gradient_clipping: float = knob(
        1.0,
        help="Norm that gradients are clipped to; 0 clips nothing.",
        codec=NUMBER,
        env="MEGATRON_LM_GRADIENT_CLIPPING",
        ask=Ask(),
    )
    megatron_lm_recompute_granularity: str | None = knob(
        help="How much is computed again.",
        codec=word_of("full", "selective"),
        choices=("full", "selective"),
        env="MEGATRON_LM_RECOMPUTE_GRANULARITY",
    )
    megatron_lm_recompute_method: str | None = knob(
        help="Which layers are computed again.",
        codec=word_of("uniform", "block"),
        choices=("uniform", "block"),
        env="MEGATRON_LM_RECOMPUTE_METHOD",
    )
    megatron_lm_recompute_num_layers: int | None = knob(
        help="Number of layers that are computed again together.", codec=INTEGER, env="MEGATRON_LM_RECOMPUTE_NUM_LAYERS"
    )
    megatron_lm_attention_backend: str | None = knob(
        help="Choice of the attention kernel.", codec=TEXT_OR_FLAG, env="MEGATRON_LM_ATTENTION_BACKEND"
    )
    megatron_lm_expert_model_parallel_size: int | None = knob(
        help="Processes that share the experts.", codec=INTEGER, env="MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE"
    )
    megatron_lm_context_parallel_size: int | None = knob(
        help="Processes that split each sequence.", codec=INTEGER, env="MEGATRON_LM_CONTEXT_PARALLEL_SIZE"
    )
    megatron_lm_attention_dropout: float | None = knob(
        help="Dropout of attention.", codec=NUMBER, env="MEGATRON_LM_ATTENTION_DROPOUT"
    )
    megatron_lm_hidden_dropout: float | None = knob(
        help="Dropout of hidden states.", codec=NUMBER, env="MEGATRON_LM_HIDDEN_DROPOUT"
    )
    megatron_lm_attention_softmax_in_fp32: bool | None = knob(
        help="Compute the softmax of attention in 32 bits.", codec=YES_NO, env="MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32"
    )
    megatron_lm_expert_tensor_parallel_size: int | None = knob(
        help="Processes that split each expert.", codec=INTEGER, env="MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE"
    )
    megatron_lm_calculate_per_token_loss: bool | None = knob(
        help="Divide the loss by tokens instead of by samples.",
        codec=YES_NO,
        env="MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS",
    )
    megatron_lm_use_rotary_position_embeddings: bool | None = knob(
        help="Use rotary position embeddings.", codec=YES_NO, env="MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS"
    )
