"""From the options of Megatron-LM and a Transformers model to the configuration objects of megatron-core."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.imports import is_package_available
from accelerate.config.plugins.megatron import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    MegatronLMPlugin,
    add_model_config_to_megatron_parser,
)
from accelerate.strategies.megatron.configs import (
    Degrees,
    MegatronConfigs,
    check_options,
    degrees_of,
    gelu_tanh,
    translate,
)
from accelerate.strategies.megatron.options import core

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not is_package_available("megatron.core"), reason="needs megatron-core")

IDS = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.zeros(2, 6, dtype=torch.long)}
ACCELERATOR = "cuda"


def gpt2(**changes: Any) -> Any:
    sizes = {"n_embd": 24, "n_layer": 4, "n_head": 4, "vocab_size": 101, "n_positions": 32}
    return SimpleNamespace(config=transformers.GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, **changes}))


def llama(**changes: Any) -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 32}
    return SimpleNamespace(config=transformers.LlamaConfig(**{**sizes, **changes}))


def bert(head: str = "ForPreTraining", **changes: Any) -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MegatronBertConfig(**{**sizes, "vocab_size": 101, "max_position_embeddings": 32, **changes})
    return getattr(transformers, f"MegatronBert{head}")(config)


def t5(**changes: Any) -> Any:
    sizes = {"d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    return SimpleNamespace(config=transformers.T5Config(**{**sizes, "vocab_size": 101, **changes}))


def glm(**changes: Any) -> Any:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 32, "head_dim": 8}
    sizes |= {"moe_intermediate_size": 10, "n_routed_experts": 4, "num_experts_per_tok": 2}
    return SimpleNamespace(config=transformers.Glm4MoeConfig(**{**sizes, **changes}))


def adam(**numbers: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], **{"lr": 0.1, "weight_decay": 0.2, **numbers})


def look_up(made: MegatronConfigs, path: str) -> Any:
    owner, _, name = path.partition(".")
    found = getattr(made, owner)
    if not name:
        return found
    return found[name] if isinstance(found, dict) else getattr(found, name)


# --- every option -----------------------------------------------------------------------------------------------------

SHARDED = {"use_distributed_optimizer": True}
TRAIN = {"train_iters": 40}
# Option, its value, what else is given, where it arrives, as what.
REACHES: list[tuple[str, Any, dict[str, Any], str, Any]] = [
    ("tp_degree", 2, {}, "transformer.tensor_model_parallel_size", 2),
    ("pp_degree", 2, {}, "transformer.pipeline_model_parallel_size", 2),
    ("pp_degree", 2, {}, "transformer.pipeline_dtype", torch.float32),
    ("context_parallel_size", 2, {}, "transformer.context_parallel_size", 2),
    ("expert_model_parallel_size", 2, {}, "degrees.expert", 2),
    ("expert_tensor_parallel_size", 2, {}, "transformer.expert_tensor_parallel_size", 2),
    ("sequence_parallelism", True, {"tp_degree": 2}, "transformer.sequence_parallel", True),
    ("sequence_parallelism", True, {}, "transformer.sequence_parallel", False),
    (
        "num_layers_per_virtual_pipeline_stage",
        1,
        {"pp_degree": 2},
        "transformer.virtual_pipeline_model_parallel_size",
        2,
    ),
    ("decoder_last_pipeline_num_layers", 1, {"pp_degree": 2}, "transformer.num_layers_in_last_pipeline_stage", 1),
    ("use_custom_fsdp", True, SHARDED, "ddp.use_megatron_fsdp", True),
    ("use_custom_fsdp", True, SHARDED, "ddp.data_parallel_sharding_strategy", "optim_grads_params"),
    ("use_distributed_optimizer", True, {}, "ddp.use_distributed_optimizer", True),
    ("use_distributed_optimizer", True, {}, "optimizer.use_distributed_optimizer", True),
    ("overlap_cpu_optimizer_d2h_h2d", True, {}, "optimizer.overlap_cpu_optimizer_d2h_h2d", True),
    ("optimizer_cpu_offload", True, {}, "optimizer.optimizer_cpu_offload", True),
    ("optimizer_cpu_offload", True, {}, "optimizer.optimizer_offload_fraction", 1.0),
    (
        "use_precision_aware_optimizer",
        True,
        {**SHARDED, "optimizer_cpu_offload": True},
        "optimizer.use_precision_aware_optimizer",
        True,
    ),
    ("recompute_activations", True, {}, "transformer.recompute_granularity", "selective"),
    ("recompute_granularity", "selective", {}, "transformer.recompute_granularity", "selective"),
    ("recompute_granularity", "full", {}, "transformer.recompute_method", "uniform"),
    ("recompute_granularity", "full", {"recompute_activations": True}, "transformer.recompute_num_layers", 1),
    ("recompute_method", "block", {}, "transformer.recompute_granularity", "full"),
    ("recompute_method", "block", {}, "transformer.recompute_method", "block"),
    ("recompute_num_layers", 2, {}, "transformer.recompute_num_layers", 2),
    ("attention_backend", True, {}, "transformer.attention_backend.name", "auto"),
    ("attention_backend", False, {}, "transformer.attention_backend.name", "local"),
    ("attention_backend", "flash", {}, "transformer.attention_backend.name", "flash"),
    ("attention_dropout", 0.25, {}, "transformer.attention_dropout", 0.25),
    ("hidden_dropout", 0.25, {}, "transformer.hidden_dropout", 0.25),
    ("hidden_dropout", 0.25, {}, "model.embedding_dropout", 0.25),
    ("use_rotary_position_embeddings", False, {}, "model.position_embedding_type", "learned_absolute"),
    ("attention_softmax_in_fp32", False, {}, "transformer.attention_softmax_in_fp32", False),
    ("calculate_per_token_loss", False, {}, "transformer.calculate_per_token_loss", False),
    ("gradient_clipping", 0.5, {}, "optimizer.clip_grad", 0.5),
    ("num_micro_batches", 3, {}, "num_micro_batches", 3),
    ("seq_length", 16, {}, "model.sequence_length", 16),
    ("decoder_seq_length", 16, {}, "model.sequence_length", 16),
    ("train_iters", 40, {}, "schedule.lr_decay_steps", 40),
    ("train_samples", 40, {}, "schedule.lr_decay_steps", 20),
    ("lr_decay_iters", 30, TRAIN, "schedule.lr_decay_steps", 30),
    ("lr_decay_iters", 30, TRAIN, "schedule.wd_incr_steps", 40),
    ("lr_decay_samples", 30, TRAIN, "schedule.lr_decay_steps", 15),
    ("lr_warmup_iters", 3, TRAIN, "schedule.lr_warmup_steps", 3),
    ("lr_warmup_samples", 6, TRAIN, "schedule.lr_warmup_steps", 3),
    ("lr_warmup_fraction", 0.1, TRAIN, "schedule.lr_warmup_steps", 4),
    ("lr_decay_style", "cosine", TRAIN, "schedule.lr_decay_style", "cosine"),
    ("min_lr", 0.01, TRAIN, "schedule.min_lr", 0.01),
    ("min_lr", 0.01, TRAIN, "optimizer.min_lr", 0.01),
    ("weight_decay_incr_style", "linear", TRAIN, "schedule.wd_incr_style", "linear"),
    ("start_weight_decay", 0.1, {**TRAIN, "weight_decay_incr_style": "linear"}, "schedule.start_wd", 0.1),
    ("end_weight_decay", 0.3, {**TRAIN, "weight_decay_incr_style": "cosine"}, "schedule.end_wd", 0.3),
    ("other_megatron_args", {"num_layers": 2}, {}, "transformer.num_layers", 2),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("pipeline_model_parallel_split_rank", 1, r"has no pipelines that are split.*Leave it out"),
    ("tensorboard_dir", "logs", r"log_with=\"tensorboard\", project_dir"),
    ("set_all_logging_options", True, r"log_with=\"tensorboard\", project_dir"),
]
BY_THE_STRATEGY = {
    *("no_wd_decay_cond", "scale_lr_cond", "lr_mult", "no_load_optim", "no_save_optim", "eod_mask_loss"),
    *("is_train_batch_min", "consumed_samples", "megatron_dataset_flag", "eval_iters", "eval_interval"),
    *("return_logits", "custom_train_step_class", "custom_train_step_kwargs", "custom_model_provider_function"),
    *("custom_prepare_model_function", "custom_megatron_datasets_provider_function", "custom_get_batch_function"),
    "custom_loss_function",
    "encoder_seq_length",  # of models that have an encoder, below
}


def test_the_table_holds_every_option() -> None:
    listed = {row[0] for row in REACHES} | {row[0] for row in REFUSED}
    assert listed | BY_THE_STRATEGY == {item.name for item in dataclasses.fields(MegatronLMPlugin)}
    assert not listed & BY_THE_STRATEGY


@pytest.mark.parametrize(("name", "value", "more", "path", "expected"), REACHES, ids=lambda value: str(value)[:40])
def test_every_option_arrives(
    name: str, value: Any, more: dict[str, Any], path: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "use_precision_aware_optimizer":
        # As if the package for accelerators were there.
        monkeypatch.setattr(core("optimizer.optimizer_config"), "is_te_min_version", lambda _: True)
        monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    plugin = MegatronLMPlugin(**{name: value, **more})
    degrees = degrees_of(plugin)
    world = degrees.tensor * degrees.pipeline * degrees.context * degrees.expert * degrees.expert_tensor
    model = glm(num_hidden_layers=4) if name.startswith("expert") else gpt2()
    made = translate(plugin, model, device_type=ACCELERATOR, micro_batch_size=2, world_size=world, optimizer=adam())
    if path.endswith(".name"):
        assert look_up(made, path.removesuffix(".name")).name == expected
    else:
        assert look_up(made, path) == expected


@pytest.mark.skipif(is_package_available("transformer_engine"), reason="says what happens without it")
def test_states_of_lower_precision_need_a_package() -> None:
    plugin = MegatronLMPlugin(use_precision_aware_optimizer=True, use_distributed_optimizer=True)
    with pytest.raises(MissingPackageError, match=r"use_precision_aware_optimizer=True\) needs.*transformer_engine"):
        translate(plugin, gpt2(), device_type=ACCELERATOR, optimizer=adam())


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"MegatronLMPlugin\({name}={value!r}\) cannot work: .*{message}"):
        check_options(MegatronLMPlugin(**{name: value}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_degree": 0}, r"tp_degree=0\) is no number"),
        ({"attention_backend": "flsh"}, r"attention_backend='flsh'\).*Write 'flash'"),
        ({"lr_decay_style": "cosin"}, r"lr_decay_style='cosin'\).*Write 'cosine'"),
        ({"weight_decay_incr_style": "inverse-square-root"}, r"weight_decay_incr_style=.*constant, linear, cosine"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, r"splits the stages of a pipeline.*pp_degree=2"),
        ({"use_custom_fsdp": True}, r"use_custom_fsdp=True\) shards.*use_distributed_optimizer=True"),
        ({"use_precision_aware_optimizer": True}, r"use_precision_aware_optimizer=True\) shards"),
        ({"train_iters": 2, "train_samples": 4}, r"train_iters=2, train_samples=4\) says one thing twice"),
        ({"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, r"says one thing twice"),
        ({"recompute_activations": True, "recompute_num_layers": 2}, r"recompute_num_layers=2\).*'full'"),
        ({"other_megatron_args": {"hiden_size": 4}}, r"other_megatron_args holds 'hiden_size'.*Write 'hidden_size'"),
        ({"other_megatron_args": {"clip_grads": 4}}, r"holds 'clip_grads'.*Write 'clip_grad'"),
    ],
)
def test_options_are_judged_without_a_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_options(MegatronLMPlugin(**options))


# --- degrees ----------------------------------------------------------------------------------------------------------


def test_degrees() -> None:
    options = {"tp_degree": 2, "pp_degree": 3, "context_parallel_size": 4, "expert_model_parallel_size": 5}
    degrees = degrees_of(MegatronLMPlugin(**options, expert_tensor_parallel_size=6))
    assert degrees == Degrees(tensor=2, pipeline=3, context=4, expert=5, expert_tensor=6)
    assert degrees_of(MegatronLMPlugin(other_megatron_args={"tensor_model_parallel_size": 8})).tensor == 8


@pytest.mark.parametrize(("layers", "virtual"), [(1, 2), (2, None)])
def test_stages_of_a_process(layers: int, virtual: int | None) -> None:
    plugin = MegatronLMPlugin(pp_degree=2, num_layers_per_virtual_pipeline_stage=layers)
    assert degrees_of(plugin).virtual_pipeline is None
    assert translate(plugin, gpt2(), device_type=ACCELERATOR, world_size=2).degrees.virtual_pipeline == virtual


def test_replicas() -> None:
    assert Degrees(tensor=2, pipeline=2).data_parallel(8) == 2
    with pytest.raises(
        ConfigurationError, match=r"tp_degree=2, pp_degree=1.*a multiple of 2 processes.*are 3. Start 4"
    ):
        Degrees(tensor=2).data_parallel(3)
    with pytest.raises(ConfigurationError, match=r"expert_model_parallel_size=4.*multiple of 4 processes.*are 2"):
        Degrees(expert=4).data_parallel(2)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (gpt2, {"tp_degree": 3}, r"tp_degree=3\) cannot share out 4 attention heads evenly. Write tp_degree=2"),
        (llama, {"tp_degree": 4}, r"tp_degree=4\) cannot share out 2 groups of queries.*Write tp_degree=2"),
        (lambda: gpt2(n_inner=42), {"tp_degree": 4}, r"cannot share out 42 columns of an MLP.*tp_degree=3"),
        (gpt2, {"pp_degree": 3}, r"pp_degree=3\) cannot share out 4 layers evenly. Write pp_degree=2"),
        (glm, {"expert_model_parallel_size": 3}, r"cannot share out 4 experts.*expert_model_parallel_size=2"),
        (gpt2, {"expert_model_parallel_size": 2}, r"parallel_size=2\) shares out experts, and this model has none"),
        (glm, {"expert_tensor_parallel_size": 3}, r"share out 10 columns of an expert.*parallel_size=2"),
        (glm, {"tp_degree": 2}, r"tp_degree=2\) with experts.*sequence_parallelism=True"),
        (t5, {"pp_degree": 2}, r"pp_degree=2\) cannot hold an encoder and a decoder.*pp_degree=1"),
        (
            lambda: gpt2(n_head=3, n_layer=4),
            {"tp_degree": 3, "sequence_parallelism": True},
            r"length 8 cannot be split into 3 equal parts.*Pad them to 9",
        ),
        (gpt2, {"context_parallel_size": 3}, r"length 8 cannot be split into 6 equal parts.*Pad them to 12"),
        (gpt2, {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 3}, r"multiple of 6 layers.*model has 4"),
        (gpt2, {"seq_length": 64}, r"length 64 do not fit a model that has learned 32 positions"),
        (llama, {"use_rotary_position_embeddings": False}, r"use_rotary_position_embeddings=False\) cannot be.*'rope'"),
        (gpt2, {"use_rotary_position_embeddings": True}, r"embeddings=True\) cannot be.*'learned_absolute'"),
        (bert, {"use_rotary_position_embeddings": True}, r"embeddings=True\) cannot be.*'learned_absolute'"),
        (t5, {"use_rotary_position_embeddings": True}, r"embeddings=True\) cannot be.*'relative'"),
        (gpt2, {"other_megatron_args": {"padded_vocab_size": 128}}, r"padded_vocab_size=128\) cannot.*Leave it out"),
        (gpt2, {"other_megatron_args": {"make_vocab_size_divisible_by": 16}}, r"divisible_by=16\) cannot work"),
        (
            gpt2,
            {"other_megatron_args": {"cpu_offloading": True, "cpu_offloading_num_layers": 9}},
            r"refuses its Transf",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make: Any, options: dict[str, Any], message: str) -> None:
    plugin = MegatronLMPlugin(**options)
    with pytest.raises(ConfigurationError, match=message):
        translate(plugin, make(), IDS, device_type=ACCELERATOR, world_size=12)


def test_an_odd_vocabulary_fills_equal_parts() -> None:
    made = translate(MegatronLMPlugin(tp_degree=4), gpt2(), world_size=4)
    assert (made.model.vocab_size, made.model.padded_vocab_size) == (101, 104)


# --- models -----------------------------------------------------------------------------------------------------------

F = torch.nn.functional
RMS = {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": False}
LAYER = {"normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True, "num_query_groups": 4}
EXACT: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        lambda: gpt2(attn_pdrop=0.2, resid_pdrop=0.3, embd_pdrop=0.4, layer_norm_epsilon=1e-4),
        (
            LAYER
            | {"num_layers": 4, "hidden_size": 24, "num_attention_heads": 4, "kv_channels": 6, "ffn_hidden_size": 96}
            | {"activation_func": gelu_tanh, "gated_linear_unit": False, "layernorm_epsilon": 1e-4}
            | {"attention_dropout": 0.2, "hidden_dropout": 0.3, "softmax_scale": None}
        ),
        (
            {"family": "gpt", "vocab_size": 101, "padded_vocab_size": 101, "max_sequence_length": 32}
            | {"sequence_length": 8, "decoder_sequence_length": None, "share_embeddings": True}
            | {"position_embedding_type": "learned_absolute", "embedding_dropout": 0.4, "output_scale": 1.0}
        ),
    ),
    "gpt2 of other sizes": (
        lambda: gpt2(n_inner=30, activation_function="relu", tie_word_embeddings=False),
        {"ffn_hidden_size": 30, "activation_func": F.relu},
        {"share_embeddings": False},
    ),
    "llama": (
        lambda: llama(attention_dropout=0.2, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
        (
            RMS
            | {"num_layers": 4, "hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6}
            | {"ffn_hidden_size": 40, "activation_func": F.silu, "gated_linear_unit": True, "layernorm_epsilon": 1e-6}
            | {"attention_dropout": 0.2, "hidden_dropout": 0.0, "rotary_interleaved": False}
        ),
        (
            {"family": "gpt", "share_embeddings": False, "position_embedding_type": "rope", "rotary_base": 5e5}
            | {"rotary_percent": 1.0, "rope_scaling": False, "embedding_dropout": 0.0, "max_sequence_length": 32}
        ),
    ),
    "llama with biases": (
        lambda: llama(attention_bias=True, mlp_bias=True, head_dim=8, tie_word_embeddings=True, hidden_act="gelu_new"),
        (
            {"add_bias_linear": True, "add_qkv_bias": True, "kv_channels": 8}
            | {"activation_func": gelu_tanh, "gated_linear_unit": True}
        ),
        {"share_embeddings": True},
    ),
    "bert": (
        lambda: bert(attention_probs_dropout_prob=0.2, hidden_dropout_prob=0.3, type_vocab_size=3, num_labels=5),
        (
            LAYER
            | {"num_layers": 2, "kv_channels": 6, "ffn_hidden_size": 40, "activation_func": F.gelu}
            | {"gated_linear_unit": False, "layernorm_epsilon": 1e-12, "attention_dropout": 0.2, "hidden_dropout": 0.3}
        ),
        (
            {"family": "bert", "num_tokentypes": 3, "add_binary_head": True, "is_pretraining": True, "num_labels": 5}
            | {"position_embedding_type": "learned_absolute", "share_embeddings": True, "embedding_dropout": 0.3}
        ),
    ),
    "bert that guesses words": (lambda: bert("ForMaskedLM"), {}, {"add_binary_head": False, "is_pretraining": True}),
    "bert that sorts sentences": (
        lambda: bert("ForSequenceClassification", num_labels=3),
        {},
        {"add_binary_head": False, "is_pretraining": False, "num_labels": 3},
    ),
    "t5": (
        lambda: t5(dropout_rate=0.2, relative_attention_num_buckets=7, relative_attention_max_distance=9),
        (
            RMS
            | {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "kv_channels": 5, "ffn_hidden_size": 40}
            | {"activation_func": F.relu, "gated_linear_unit": False, "layernorm_epsilon": 1e-6, "softmax_scale": 1.0}
            | {"attention_dropout": 0.2, "hidden_dropout": 0.2}
        ),
        (
            {"family": "t5", "num_decoder_layers": 3, "sequence_length": 8, "decoder_sequence_length": 6}
            | {"position_embedding_type": "relative", "share_embeddings": True, "output_scale": 24**-0.5}
            | {"relative_attention_num_buckets": 7, "relative_attention_max_distance": 9, "embedding_dropout": 0.2}
        ),
    ),
    "t5 1.1": (
        lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        {"activation_func": gelu_tanh, "gated_linear_unit": True},
        {"output_scale": 1.0, "share_embeddings": True},
    ),
    "glm": (
        lambda: glm(attention_bias=True, use_qk_norm=True, n_shared_experts=2, routed_scaling_factor=2.5),
        (
            RMS
            | {"add_qkv_bias": True, "qk_layernorm": True, "num_query_groups": 2, "kv_channels": 8}
            | {"ffn_hidden_size": 40, "activation_func": F.silu, "gated_linear_unit": True, "num_moe_experts": 4}
            | {"moe_ffn_hidden_size": 10, "moe_shared_expert_intermediate_size": 20, "moe_layer_freq": [0, 1, 1]}
            | {"moe_router_topk": 2, "moe_router_topk_scaling_factor": 2.5, "moe_router_score_function": "sigmoid"}
            | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.0}
            | {"moe_router_num_groups": None}
            | {"moe_router_load_balancing_type": "none", "layernorm_epsilon": 1e-5, "hidden_dropout": 0.0}
        ),
        {"family": "gpt", "rotary_percent": 0.5, "rotary_base": 10000.0, "share_embeddings": False},
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_model_keeps_its_shape(name: str) -> None:
    make, transformer, arguments = EXACT[name]
    made = translate(MegatronLMPlugin(), make(), IDS)
    assert {field: getattr(made.transformer, field) for field in transformer} == transformer
    assert {field: getattr(made.model, field) for field in arguments} == arguments


def test_a_length_of_the_encoder() -> None:
    assert translate(MegatronLMPlugin(encoder_seq_length=4), t5(), IDS).model.sequence_length == 4
    assert translate(MegatronLMPlugin(encoder_seq_length=4), bert(), IDS).model.sequence_length == 4


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "silu"])
def test_activations_are_those_of_transformers(name: str) -> None:
    made = translate(MegatronLMPlugin(), gpt2(activation_function=name)).transformer
    hidden = torch.linspace(-4, 4, 101)
    torch.testing.assert_close(made.activation_func(hidden), transformers.activations.ACT2FN[name](hidden))


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "config",
    [
        llama(rope_parameters={"rope_theta": 123.0, "rope_type": "default"}, head_dim=16).config,
        llama(
            max_position_embeddings=16384,
            rope_parameters={**LLAMA3, "original_max_position_embeddings": 8192},
            head_dim=32,
        ).config,
        glm(head_dim=16).config,
    ],
    ids=["plain", "llama3", "half of a head"],
)
def test_rotary_frequencies_are_those_of_transformers(config: Any) -> None:
    kind = transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeRotaryEmbedding
    if config.model_type == "llama":
        kind = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    made = translate(MegatronLMPlugin(), SimpleNamespace(config=config))
    rotary = core("models.common.embeddings.rotary_pos_embedding").RotaryEmbedding(
        made.transformer.kv_channels,
        made.model.rotary_percent,
        rotary_base=made.model.rotary_base,
        rope_scaling=made.model.rope_scaling,
        rope_scaling_factor=made.model.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    torch.testing.assert_close(rotary.inv_freq, kind(config).inv_freq)


@pytest.mark.parametrize("groups", [{}, {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}])
def test_experts_are_chosen_as_by_transformers(groups: dict[str, int]) -> None:
    torch.manual_seed(0)
    config = glm(n_routed_experts=16, routed_scaling_factor=1.5, **groups).config
    router = transformers.models.glm4_moe.modeling_glm4_moe.Glm4MoeTopkRouter(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias, std=0.1)
    logits, weights, chosen = router(torch.randn(9, 24))
    made = translate(MegatronLMPlugin(), SimpleNamespace(config=config)).transformer
    probabilities, _ = core("transformer.moe.moe_utils").topk_routing_with_score_function(
        logits,
        made.moe_router_topk,
        use_pre_softmax=made.moe_router_pre_softmax,
        num_groups=made.moe_router_num_groups,
        group_topk=made.moe_router_group_topk,
        scaling_factor=made.moe_router_topk_scaling_factor,
        score_function=made.moe_router_score_function,
        expert_bias=router.e_score_correction_bias,
    )
    torch.testing.assert_close(probabilities, torch.zeros_like(logits).scatter(1, chosen, weights))


def test_a_parser_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODEL_CONFIGS_TO_MEGATRON_PARSERS, "mine", lambda *_: None)
    written: dict[str, Any] = (
        {"model_type_name": "gpt", "num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 8}
        | {"max_position_embeddings": 16, "orig_vocab_size": 101, "swiglu": True, "num_query_groups": 2}
        | {"disable_bias_linear": True}
    )

    @add_model_config_to_megatron_parser("mine")
    def parse(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
        megatron_lm_plugin.megatron_lm_default_args.update(written)

    model = SimpleNamespace(config=SimpleNamespace(model_type="mine"))
    with pytest.raises(
        ConfigurationError, match=r"megatron_lm_default_args holds 'disable_bias_linear'.*'add_bias_lin"
    ):
        translate(MegatronLMPlugin(), model)
    del written["disable_bias_linear"]
    made = translate(MegatronLMPlugin(use_rotary_position_embeddings=True), model)
    assert (made.transformer.activation_func, made.transformer.gated_linear_unit) == (F.silu, True)
    assert (made.transformer.num_query_groups, made.transformer.ffn_hidden_size) == (2, 96)
    assert (made.model.position_embedding_type, made.model.share_embeddings) == ("rope", True)
    written["group_query_attention"] = False
    assert translate(MegatronLMPlugin(), model).transformer.num_query_groups == 4
    del written["orig_vocab_size"]
    with pytest.raises(ConfigurationError, match=r"Nothing says the model's 'orig_vocab_size'"):
        translate(MegatronLMPlugin(), model)


# --- other_megatron_args ----------------------------------------------------------------------------------------------


def test_other_arguments_win_under_either_name() -> None:
    others = {"layernorm_epsilon": 0.5, "hidden_dropout": 0.75, "masked_softmax_fusion": True, "bucket_size": 7}
    made = translate(MegatronLMPlugin(other_megatron_args={**others, "reset_position_ids": True}), gpt2())
    found = {name: getattr(made.ddp if name == "bucket_size" else made.transformer, name) for name in others}
    assert found == others
    made = translate(MegatronLMPlugin(other_megatron_args={"norm_epsilon": 0.25, "lr": 7.0}), gpt2(), optimizer=adam())
    assert made.transformer.layernorm_epsilon == 0.25
    assert made.optimizer is not None
    assert made.optimizer.lr == 7.0
    others = {"activation_func": F.relu, "num_micro_batches": 3, "train_samples": 60}
    made = translate(MegatronLMPlugin(other_megatron_args=others), gpt2(), micro_batch_size=2, optimizer=adam())
    assert (made.transformer.activation_func, made.num_micro_batches) == (F.relu, 3)
    assert made.schedule is not None
    assert made.schedule["lr_decay_steps"] == 10


# --- devices and precision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp_degree": 2}, r"pp_degree=2\) needs an accelerator.*pp_degree=1"),
        ({"context_parallel_size": 2}, r"context_parallel_size=2\) needs an accelerator.*context_parallel_size=1"),
        ({"expert_model_parallel_size": 2}, r"expert_model_parallel_size=2\) needs an accelerator"),
        ({"use_custom_fsdp": True}, r"use_custom_fsdp=True\) needs.*FullyShardedDataParallelPlugin"),
        ({"optimizer_cpu_offload": True}, r"optimizer_cpu_offload=True\) needs.*optimizer_cpu_offload=False"),
        ({"use_precision_aware_optimizer": True}, r"use_precision_aware_optimizer=True\) needs"),
        ({"num_layers_per_virtual_pipeline_stage": 1}, r"num_layers_per_virtual_pipeline_stage=1\) needs"),
        ({"attention_backend": "flash"}, r"attention_backend='flash'\) needs.*'auto'"),
        ({"attention_backend": "fused"}, r"attention_backend='fused'\) needs.*'auto'"),
        ({"other_megatron_args": {"bf16": True}}, r"'bf16': True}\) cannot work on the CPU.*mixed_precision='bf16'"),
    ],
)
def test_what_needs_an_accelerator_is_refused_on_the_cpu(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        translate(MegatronLMPlugin(**options), gpt2(), world_size=4)


def test_on_the_cpu_nothing_is_fused_and_states_stay_whole() -> None:
    plugin = MegatronLMPlugin(use_distributed_optimizer=True)
    made = translate(plugin, gpt2(), mixed_precision="bf16", optimizer=adam())
    fusions = {item.name for item in dataclasses.fields(made.transformer) if item.name.endswith("fusion")}
    assert not any(getattr(made.transformer, name) for name in fusions | {"persist_layer_norm", "bf16", "fp16"})
    assert made.transformer.use_cpu_initialization
    assert made.transformer.perform_initialization
    assert made.transformer.params_dtype == torch.float32
    assert made.optimizer is not None
    assert (made.ddp.use_distributed_optimizer, made.optimizer.use_distributed_optimizer) == (False, False)
    assert made.optimizer.bf16 is False


@pytest.mark.parametrize(("precision", "dtype"), [("no", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_precision_on_an_accelerator(precision: str, dtype: str) -> None:
    made = translate(MegatronLMPlugin(), gpt2(), device_type=ACCELERATOR, mixed_precision=precision, optimizer=adam())
    for part in (made.transformer, made.optimizer):
        assert part is not None
        assert (part.bf16, part.fp16) == (precision == "bf16", precision == "fp16")
        assert part.params_dtype == getattr(torch, dtype)
    assert made.transformer.enable_autocast is False
    assert made.ddp.grad_reduce_in_fp32 == (precision == "bf16")
    assert made.transformer.use_cpu_initialization is False


def test_a_precision_does_not_outlive_its_run() -> None:
    plugin = MegatronLMPlugin()
    translate(plugin, gpt2(), device_type=ACCELERATOR, mixed_precision="bf16")
    assert translate(plugin, gpt2(), device_type=ACCELERATOR).transformer.bf16 is False


@pytest.mark.parametrize(
    ("precision", "device", "message"),
    [("fp16", "cpu", r"'fp16' cannot train on the CPU.*'bf16'"), ("fp8", ACCELERATOR, r"'fp8' has no.*'hybrid'")],
)
def test_precisions_that_cannot_be(precision: str, device: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        translate(MegatronLMPlugin(), gpt2(), device_type=device, mixed_precision=precision)


def test_batches() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=3)
    made = translate(plugin, gpt2(), micro_batch_size=2, world_size=4)
    assert (made.num_micro_batches, made.micro_batch_size) == (3, 2)
    assert plugin.megatron_lm_default_args["global_batch_size"] == 24
    assert translate(MegatronLMPlugin(), gpt2()).micro_batch_size is None
