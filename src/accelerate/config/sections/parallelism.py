"""Launch options of the layout of processes on axes of parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import INTEGER, TRUE_FALSE, Ask, knob, word_of
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class ParallelismOptions(LaunchSection):
    """How many processes each axis has."""

    title: ClassVar[str] = "ParallelismConfig Arguments"
    file_key: ClassVar[str | None] = "parallelism_config"
    prefix: ClassVar[str] = "parallelism_config_"
    switch: ClassVar[str | None] = "use_parallelism_config"

    parallelism_config_dp_replicate_size: int = knob(
        1, help="Replicas of the model.", codec=INTEGER, env="PARALLELISM_CONFIG_DP_REPLICATE_SIZE", ask=Ask()
    )
    parallelism_config_dp_shard_size: int = knob(
        1,
        help="Processes that share the weights of a replica.",
        codec=INTEGER,
        env="PARALLELISM_CONFIG_DP_SHARD_SIZE",
        ask=Ask(),
    )
    parallelism_config_tp_size: int = knob(
        1, help="Processes that split each layer.", codec=INTEGER, env="PARALLELISM_CONFIG_TP_SIZE", ask=Ask()
    )
    parallelism_config_cp_size: int = knob(
        1,
        help="Processes that split each sequence by context parallelism.",
        codec=INTEGER,
        env="PARALLELISM_CONFIG_CP_SIZE",
        ask=Ask(only_if=lambda answers: bool(answers["use_fsdp"])),
    )
    parallelism_config_cp_backend: str = knob(
        "torch",
        help="Engine of context parallelism.",
        codec=word_of("torch"),
        choices=("torch",),
        env="PARALLELISM_CONFIG_CP_BACKEND",
    )
    parallelism_config_cp_comm_strategy: str = knob(
        "allgather",
        help="How the parts of a sequence are exchanged.",
        codec=word_of("allgather", "alltoall"),
        choices=("allgather", "alltoall"),
        env="PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        only_if=lambda config: config["parallelism_config_cp_size"] > 1,
        ask=Ask(),
    )
    parallelism_config_sp_size: int = knob(
        1,
        help="Processes that split each sequence by sequence parallelism.",
        codec=INTEGER,
        env="PARALLELISM_CONFIG_SP_SIZE",
        ask=Ask(only_if=lambda answers: bool(answers["use_deepspeed"])),
    )
    parallelism_config_sp_backend: str = knob(
        "deepspeed",
        help="Engine of sequence parallelism.",
        codec=word_of("deepspeed"),
        choices=("deepspeed",),
        env="PARALLELISM_CONFIG_SP_BACKEND",
    )
    parallelism_config_sp_seq_length: int | None = knob(
        help="Length of all sequences, where it is fixed.",
        codec=INTEGER,
        env="PARALLELISM_CONFIG_SP_SEQ_LENGTH",
        only_if=lambda config: config["parallelism_config_sp_size"] > 1,
        ask=Ask(
            only_if=lambda answers: not answers["parallelism_config_sp_seq_length_is_variable"],
            after="parallelism_config_sp_seq_length_is_variable",
        ),
    )
    parallelism_config_sp_seq_length_is_variable: bool = knob(
        True,
        help="Sequences differ in length.",
        codec=TRUE_FALSE,
        env="PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        only_if=lambda config: config["parallelism_config_sp_size"] > 1,
        ask=Ask(),
    )
    parallelism_config_sp_attn_implementation: str = knob(
        "sdpa",
        help="Attention that sequence parallelism uses.",
        env="PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        only_if=lambda config: config["parallelism_config_sp_size"] > 1,
        ask=Ask(),
    )
    parallelism_config_pp_size: int = knob(
        1, help="Stages of a pipeline that the layers are spread over.", codec=INTEGER, env="PARALLELISM_CONFIG_PP_SIZE"
    )
    parallelism_config_pp_schedule: str = knob(
        "1f1b",
        help="How the stages of a pipeline take turns.",
        codec=word_of("1f1b", "gpipe"),
        choices=("1f1b", "gpipe"),
        env="PARALLELISM_CONFIG_PP_SCHEDULE",
        only_if=lambda config: config["parallelism_config_pp_size"] > 1,
    )
    parallelism_config_pp_num_microbatches: int | None = knob(
        help="Parts that a pipeline cuts a batch into; one a stage if not given.",
        codec=INTEGER,
        env="PARALLELISM_CONFIG_PP_NUM_MICROBATCHES",
        only_if=lambda config: config["parallelism_config_pp_size"] > 1,
    )
