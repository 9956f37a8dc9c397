"""The plugins of the engines: a given value wins over its variable, and that over the default, for every field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate.config.knob import knobs
from accelerate.config.plugins.deepspeed import DeepSpeedPlugin
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.config.plugins.parallelism import DeepSpeedSequenceParallelConfig, TorchContextParallelConfig
from accelerate.config.sections.registry import options

# Field -> the default; the variable, its text and what that gives; a given value and what it gives.
Row = tuple[Any, str, str, Any, Any, Any]

_FSDP: dict[str, Row] = {
    "fsdp_version": (1, "FSDP_VERSION", "2", 2, 1, 1),
    "sharding_strategy": (
        fsdp.ShardingStrategy.FULL_SHARD,
        "FSDP_SHARDING_STRATEGY",
        "3",
        fsdp.ShardingStrategy.NO_SHARD,
        fsdp.ShardingStrategy.HYBRID_SHARD,
        fsdp.ShardingStrategy.HYBRID_SHARD,
    ),
    "reshard_after_forward": (
        None,
        "FSDP_RESHARD_AFTER_FORWARD",
        "SHARD_GRAD_OP",
        fsdp.ShardingStrategy.SHARD_GRAD_OP,
        "full_shard",
        fsdp.ShardingStrategy.FULL_SHARD,
    ),
    "backward_prefetch": (
        None,
        "FSDP_BACKWARD_PREFETCH",
        "BACKWARD_PRE",
        fsdp.BackwardPrefetch.BACKWARD_PRE,
        "backward_post",
        fsdp.BackwardPrefetch.BACKWARD_POST,
    ),
    "auto_wrap_policy": (
        None,
        "FSDP_AUTO_WRAP_POLICY",
        "SIZE_BASED_WRAP",
        size_based_auto_wrap_policy,
        "transformer_based_wrap",
        transformer_auto_wrap_policy,
    ),
    "cpu_offload": (
        fsdp.CPUOffload(False),
        "FSDP_OFFLOAD_PARAMS",
        "true",
        fsdp.CPUOffload(True),
        False,
        fsdp.CPUOffload(False),
    ),
    "ignored_modules": (None, "FSDP_IGNORED_MODULES", "head.*", "head.*", "body", "body"),
    "state_dict_type": (
        fsdp.StateDictType.FULL_STATE_DICT,
        "FSDP_STATE_DICT_TYPE",
        "SHARDED_STATE_DICT",
        fsdp.StateDictType.SHARDED_STATE_DICT,
        "full_state_dict",
        fsdp.StateDictType.FULL_STATE_DICT,
    ),
    "use_orig_params": (False, "FSDP_USE_ORIG_PARAMS", "true", True, False, False),
    "sync_module_states": (False, "FSDP_SYNC_MODULE_STATES", "true", True, False, False),
    "forward_prefetch": (False, "FSDP_FORWARD_PREFETCH", "true", True, False, False),
    "activation_checkpointing": (False, "FSDP_ACTIVATION_CHECKPOINTING", "true", True, False, False),
    "cpu_ram_efficient_loading": (False, "FSDP_CPU_RAM_EFFICIENT_LOADING", "true", True, False, False),
    "transformer_cls_names_to_wrap": (None, "FSDP_TRANSFORMER_CLS_TO_WRAP", "A, B", ["A", "B"], ["C"], ["C"]),
    "min_num_params": (None, "FSDP_MIN_NUM_PARAMS", "200", 200, 5, 5),
}

_DS = "ACCELERATE_DEEPSPEED_"
_DEEPSPEED: dict[str, Row] = {
    "gradient_accumulation_steps": ("auto", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3", 3, 4, 4),
    "gradient_clipping": ("auto", "ACCELERATE_GRADIENT_CLIPPING", "0.5", 0.5, 2.0, 2.0),
    "zero_stage": (2, _DS + "ZERO_STAGE", "3", 3, "1", 1),
    "offload_optimizer_device": ("none", _DS + "OFFLOAD_OPTIMIZER_DEVICE", "cpu", "cpu", "nvme", "nvme"),
    "offload_param_device": ("none", _DS + "OFFLOAD_PARAM_DEVICE", "cpu", "cpu", "nvme", "nvme"),
    "offload_optimizer_nvme_path": ("none", _DS + "OFFLOAD_OPTIMIZER_NVME_PATH", "/disk", "/disk", "/other", "/other"),
    "offload_param_nvme_path": ("none", _DS + "OFFLOAD_PARAM_NVME_PATH", "/disk", "/disk", "/other", "/other"),
    "zero3_save_16bit_model": (False, _DS + "ZERO3_SAVE_16BIT_MODEL", "true", True, False, False),
    "transformer_moe_cls_names": (None, _DS + "MOE_LAYER_CLS_NAMES", "A,B", "A,B", "C", "C"),
    "enable_msamp": (False, "ACCELERATE_FP8_BACKEND", "msamp", True, False, False),
    "msamp_opt_level": ("O1", "ACCELERATE_FP8_OPT_LEVEL", "O2", "O2", "O1", "O1"),
}

_NUMBERS = {
    **dict.fromkeys(("tp_degree", "pp_degree", "num_micro_batches", "context_parallel_size"), 1),
    **dict.fromkeys(("expert_model_parallel_size", "expert_tensor_parallel_size"), 1),
    **dict.fromkeys(("decoder_last_pipeline_num_layers", "recompute_num_layers"), None),
}
# None is as the model says, or no recomputation.
_FRACTIONS = {"attention_dropout": None, "hidden_dropout": None, "gradient_clipping": 1.0}
_OFF = (
    "use_custom_fsdp overlap_cpu_optimizer_d2h_h2d no_load_optim eod_mask_loss no_save_optim optimizer_cpu_offload "
    "use_precision_aware_optimizer sequence_parallelism recompute_activations use_distributed_optimizer"
)
_ON = "attention_softmax_in_fp32 calculate_per_token_loss attention_backend"
_MEGATRON: dict[str, Row] = {
    name: (default, f"MEGATRON_LM_{name.upper()}", text, value, given, given)
    for names, text, value, given in (
        (_NUMBERS, "4", 4, 8),
        (_FRACTIONS, "0.25", 0.25, 0.5),
        (dict.fromkeys(_OFF.split(), False), "True", True, False),
        (dict.fromkeys(_ON.split(), True), "False", False, True),
        ({"use_rotary_position_embeddings": None}, "False", False, True),
        ({"recompute_granularity": None}, "selective", "selective", "full"),
        ({"recompute_method": None}, "block", "block", "uniform"),
    )
    for name, default in names.items()
}

_SP = "PARALLELISM_CONFIG_SP_"
_SEQUENCE: dict[str, Row] = {
    "sp_seq_length": (None, _SP + "SEQ_LENGTH", "128", 128, 64, 64),
    "sp_seq_length_is_variable": (True, _SP + "SEQ_LENGTH_IS_VARIABLE", "false", False, True, True),
    "sp_attn_implementation": (
        None,
        _SP + "ATTN_IMPLEMENTATION",
        "flash_attention_2",
        "flash_attention_2",
        "sdpa",
        "sdpa",
    ),
}
_CONTEXT: dict[str, Row] = {
    "cp_comm_strategy": (
        "allgather",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        "alltoall",
        "alltoall",
        "allgather",
        "allgather",
    )
}

TABLES: dict[type[Any], dict[str, Row]] = {
    FullyShardedDataParallelPlugin: _FSDP,
    DeepSpeedPlugin: _DEEPSPEED,
    MegatronLMPlugin: _MEGATRON,
    DeepSpeedSequenceParallelConfig: _SEQUENCE,
    TorchContextParallelConfig: _CONTEXT,
}
# Fields whose value needs a second option, or stands for a whole file: tested with their rules.
ELSEWHERE = {"activation_checkpointing_offload", "hf_ds_config", "zero3_init_flag"}
# What a value needs beside it.
COMPANIONS: dict[str, dict[str, Any]] = {"sp_seq_length_is_variable": {"sp_seq_length": 16}}
CASES = [(plugin, name) for plugin, table in TABLES.items() for name in table]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    # A plugin writes this one, so it must be restored.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")


@pytest.mark.parametrize("plugin", TABLES, ids=lambda plugin: plugin.__name__)
def test_the_table_holds_every_field_that_has_a_variable(plugin: type[Any]) -> None:
    with_variable = {name for name, declared in knobs(plugin).items() if declared.env is not None}
    assert set(TABLES[plugin]) == with_variable - ELSEWHERE


@pytest.mark.parametrize(("plugin", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.filterwarnings("ignore:.*is the old name of:FutureWarning")
def test_given_wins_over_variable_and_that_over_default(
    plugin: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    default, variable, text, from_variable, given, from_given = TABLES[plugin][name]
    companions = COMPANIONS.get(name, {})
    assert getattr(plugin(**companions), name) == default
    monkeypatch.setenv(variable, text)
    assert getattr(plugin(**companions), name) == from_variable
    assert getattr(plugin(**companions, **{name: given}), name) == from_given


@pytest.mark.parametrize("plugin", TABLES, ids=lambda plugin: plugin.__name__)
def test_fields_without_a_variable_keep_their_default_and_what_is_given(plugin: type[Any]) -> None:
    plain = {item.name: item.default for item in dataclasses.fields(plugin) if knobs(plugin)[item.name].env is None}
    made = plugin()
    derived = {"state_dict_config", "optim_state_dict_config"}
    assert {name: getattr(made, name) for name in plain if name not in derived} == {
        name: default for name, default in plain.items() if name not in derived
    }
    numbers = {name: not value for name, value in plain.items() if isinstance(value, bool)}
    assert {name: getattr(plugin(**numbers), name) for name in numbers} == numbers


@pytest.mark.parametrize("plugin", TABLES, ids=lambda plugin: plugin.__name__)
def test_every_variable_is_one_that_the_launcher_writes(plugin: type[Any]) -> None:
    written = {option.knob.env for option in options().values()}
    assert {declared.env for declared in knobs(plugin).values() if declared.env is not None} <= written


def test_a_variable_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "many")
    with pytest.raises(ValueError, match=r"FSDP_MIN_NUM_PARAMS='many' is not a whole number"):
        FullyShardedDataParallelPlugin()
