"""Launch options of how a model computes: compiler, 8-bit floats, axes of parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from accelerate._base.constants import TORCH_DYNAMO_MODES
from accelerate._base.enums import DynamoBackend
from accelerate.config.knob import ONE_ZERO, TRUE_FALSE, Ask, Condition, LaunchSection, flags, knob, word_of

_COMPILERS = tuple(member.value.lower() for member in DynamoBackend)
# A spelling that launchers have always taken, and the name that torch 1 had.
_OTHER_COMPILERS = {"torhchxla_trace_once": "torchxla_trace_once", "aot_cudagraphs": "cudagraphs"}
FP8_OVERRIDES = tuple(f"ACCELERATE_FP8_OVERRIDE_{part}" for part in ("FPROP", "DGRAD", "WGRAD"))


def _compiles(answers: Mapping[str, Any]) -> bool:
    return bool(answers["dynamo_backend"] != "no")


def _asked_with(library: str, choices: tuple[str, ...] = ()) -> Ask:
    return Ask(choices=choices, only_if=lambda answers: bool(answers["fp8_backend"] == library))


def _several(axis: str) -> Condition:
    return lambda config: config[f"parallelism_config_{axis}_size"] > 1


class DynamoOptions(LaunchSection):
    """How models are compiled."""

    title: ClassVar[str] = "Resource Selection Arguments"
    file_key: ClassVar[str | None] = "dynamo_config"
    prefix: ClassVar[str] = "dynamo_"
    variables: ClassVar[str | None] = "ACCELERATE_"

    dynamo_backend: str | None = knob(
        help="Compiler of torch.compile; `no` compiles nothing.",
        codec=word_of(*_COMPILERS, written_upper=True, aliases=_OTHER_COMPILERS),
        choices=_COMPILERS,
        fallback="no",
        ask=Ask("Compiler for models (torch.compile)"),
    )
    dynamo_mode: str = knob(
        "default", help="Preset of torch.compile.", choices=tuple(TORCH_DYNAMO_MODES), ask=Ask(only_if=_compiles)
    )
    dynamo_use_fullgraph: bool = knob(
        False,
        help="Refuse models that cannot be captured whole.",
        codec=TRUE_FALSE,
        shape="switch",
        ask=Ask(only_if=_compiles),
    )
    dynamo_use_dynamic: bool = knob(
        False, help="Compile for changing shapes.", codec=TRUE_FALSE, shape="switch", ask=Ask(only_if=_compiles)
    )
    dynamo_use_regional_compilation: bool = knob(
        False,
        help="Compile repeated blocks once each, instead of the whole model.",
        codec=TRUE_FALSE,
        shape="switch",
        ask=Ask(only_if=_compiles),
    )


class Fp8Options(LaunchSection):
    """How 8-bit training computes."""

    title: ClassVar[str] = "FP8 Arguments"
    file_key: ClassVar[str | None] = "fp8_config"
    prefix: ClassVar[str] = "fp8_"
    variables: ClassVar[str | None] = "ACCELERATE_"
    only_if: ClassVar[Condition | None] = staticmethod(lambda config: bool(config["mixed_precision"] == "fp8"))

    fp8_backend: str | None = knob(help="Library that computes.", choices=("ao", "te", "msamp"), ask=Ask())
    fp8_use_autocast_during_eval: bool = knob(
        False, help="Compute in 8 bits in evaluation too.", codec=TRUE_FALSE, shape="switch", ask=_asked_with("te")
    )
    fp8_margin: int = knob(0, help="Margin of the scaling factor.", ask=_asked_with("te"))
    fp8_interval: int = knob(1, help="Steps between two computations of the scaling factor.", ask=_asked_with("te"))
    fp8_format: str = knob("HYBRID", help="Number format.", choices=("HYBRID", "E4M3", "E5M2"), ask=_asked_with("te"))
    fp8_amax_history_len: int = knob(
        1024,
        help="Length of the history behind the scaling factor.",
        old_keys=("fp8_amax_history_length",),
        ask=_asked_with("te"),
    )
    fp8_amax_compute_algo: str = knob(
        "most_recent",
        help="What is taken from the history.",
        choices=("max", "most_recent"),
        old_keys=("fp8_amax_compute_algorithm",),
        ask=_asked_with("te", choices=("most_recent", "max")),
    )
    fp8_override_linear_precision: tuple[bool, ...] = knob(
        (False, False, False),
        help="Parts that compute in higher precision: forward, gradient of inputs, gradient of weights.",
        codec=flags(len(FP8_OVERRIDES)),
        env=",".join(FP8_OVERRIDES),
        ask=_asked_with("te"),
    )
    fp8_opt_level: str = knob(
        "O2",
        help="How much of the training is kept in 8 bits.",
        choices=("O1", "O2"),
        old_keys=("fp8_optimization_level",),
        ask=_asked_with("msamp"),
    )
    fp8_enable_fsdp_float8_all_gather: bool = knob(
        True, help="Let FSDP gather weights in 8 bits.", codec=ONE_ZERO, ask=_asked_with("ao")
    )
    fp8_pad_inner_dim: bool = knob(
        True, help="Pad matrices to a multiple of 16.", codec=ONE_ZERO, ask=_asked_with("ao")
    )


class ParallelismOptions(LaunchSection):
    """How many processes each axis has."""

    title: ClassVar[str] = "ParallelismConfig Arguments"
    file_key: ClassVar[str | None] = "parallelism_config"
    prefix: ClassVar[str] = "parallelism_config_"
    switch: ClassVar[str | None] = "use_parallelism_config"
    variables: ClassVar[str | None] = ""

    parallelism_config_dp_replicate_size: int = knob(1, help="Replicas of the model.", ask=Ask())
    parallelism_config_dp_shard_size: int = knob(1, help="Processes that share the weights of a replica.", ask=Ask())
    parallelism_config_tp_size: int = knob(1, help="Processes that split each layer.", ask=Ask())
    parallelism_config_cp_size: int = knob(
        1,
        help="Processes that split each sequence by context parallelism.",
        ask=Ask(only_if=lambda answers: bool(answers["use_fsdp"])),
    )
    parallelism_config_cp_backend: str = knob("torch", help="Engine of context parallelism.", choices=("torch",))
    parallelism_config_cp_comm_strategy: str = knob(
        "allgather",
        help="How the parts of a sequence are exchanged.",
        choices=("allgather", "alltoall"),
        only_if=_several("cp"),
        ask=Ask(),
    )
    parallelism_config_sp_size: int = knob(
        1,
        help="Processes that split each sequence by sequence parallelism.",
        ask=Ask(only_if=lambda answers: bool(answers["use_deepspeed"])),
    )
    parallelism_config_sp_backend: str = knob(
        "deepspeed", help="Engine of sequence parallelism.", choices=("deepspeed",)
    )
    parallelism_config_sp_seq_length: int | None = knob(
        help="Length of all sequences, where it is fixed.",
        only_if=_several("sp"),
        ask=Ask(
            only_if=lambda answers: not answers["parallelism_config_sp_seq_length_is_variable"],
            after="parallelism_config_sp_seq_length_is_variable",
        ),
    )
    parallelism_config_sp_seq_length_is_variable: bool = knob(
        True, help="Sequences differ in length.", codec=TRUE_FALSE, only_if=_several("sp"), ask=Ask()
    )
    parallelism_config_sp_attn_implementation: str = knob(
        "sdpa", help="Attention that sequence parallelism uses.", only_if=_several("sp"), ask=Ask()
    )
    parallelism_config_pp_size: int = knob(1, help="Stages of a pipeline that the layers are spread over.")
    parallelism_config_pp_schedule: str = knob(
        "1f1b", help="How the stages of a pipeline take turns.", choices=("1f1b", "gpipe"), only_if=_several("pp")
    )
    parallelism_config_pp_num_microbatches: int | None = knob(
        help="Parts that a pipeline cuts a batch into; one a stage if not given.", only_if=_several("pp")
    )
