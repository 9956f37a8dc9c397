"""Megatron-LM's plugin: the arguments that it gathers for the engine."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.helpers import reset_warnings
from accelerate._base.imports import is_package_available
from accelerate.config.plugins.megatron import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    MegatronLMPlugin,
    add_model_config_to_megatron_parser,
)

transformers = pytest.importorskip("transformers")
IDS = {"input_ids": torch.zeros(2, 7, dtype=torch.long), "labels": torch.zeros(2, 5, dtype=torch.long)}
COMMON = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "orig_vocab_size": 20,
    "model_return_dict": True,
    "ffn_hidden_size": 16,
    "kv_channels": 4,
}
# What a GPT-2 and a BERT have in common beside the sizes.
LEARNED = {
    "position_embedding_type": "learned_absolute",
    "untie_embeddings_and_output_weights": False,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "gated_linear_unit": False,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "embedding_dropout": 0.1,
}
SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 20,
    "max_position_embeddings": 16,
    "intermediate_size": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 20,
    "n_positions": 16,
    "n_inner": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    reset_warnings()
    before = dict(MODEL_CONFIGS_TO_MEGATRON_PARSERS)
    yield
    MODEL_CONFIGS_TO_MEGATRON_PARSERS.clear()
    MODEL_CONFIGS_TO_MEGATRON_PARSERS.update(before)


def added(plugin: MegatronLMPlugin, method: str, *args: Any) -> dict[str, Any]:
    """Return the arguments that a method adds or changes."""
    before = dict(plugin.megatron_lm_default_args)
    getattr(plugin, method)(*args)
    return {k: v for k, v in plugin.megatron_lm_default_args.items() if k not in before or before[k] != v}


def parameter() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(1))]


def test_options_become_arguments_under_the_engines_names() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, sequence_parallelism=True, gradient_clipping=0.5, consumed_samples=[1])
    args = plugin.megatron_lm_default_args
    assert args["tensor_model_parallel_size"] == 2
    assert args["pipeline_model_parallel_size"] == 1
    assert args["sequence_parallel"] is True
    assert args["clip_grad"] == 0.5
    assert args["consumed_samples"] == [1, 0, 0]
    assert args["context_parallel_size"] == 1
    assert args["DDP_impl"] == "torch"
    assert "tensorboard_dir" not in args
    assert MegatronLMPlugin(tensorboard_dir="logs").megatron_lm_default_args["tensorboard_dir"] == "logs"
    assert MegatronLMPlugin(consumed_samples=[1, 2, 3]).consumed_samples == [1, 2, 3]


@pytest.mark.parametrize("options", [{"pp_degree": 2}, {"use_distributed_optimizer": True}])
def test_pipelines_and_sharded_optimizers_need_the_local_ddp(options: dict[str, Any]) -> None:
    assert MegatronLMPlugin(**options).megatron_lm_default_args["DDP_impl"] == "local"


def test_other_arguments_win() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, other_megatron_args={"tensor_model_parallel_size": 4, "more": 1})
    assert plugin.megatron_lm_default_args["tensor_model_parallel_size"] == 4
    assert plugin.megatron_lm_default_args["more"] == 1


def test_what_the_model_says_is_no_argument_before() -> None:
    names = "attention_dropout hidden_dropout use_rotary_position_embeddings"
    names += " recompute_granularity recompute_method recompute_num_layers"
    assert not set(names.split()) & set(MegatronLMPlugin().megatron_lm_default_args)
    given = MegatronLMPlugin(hidden_dropout=0.0, recompute_num_layers=2).megatron_lm_default_args
    assert (given["hidden_dropout"], given["recompute_num_layers"]) == (0.0, 2)


def test_other_arguments_win_over_the_model_and_the_optimizer() -> None:
    plugin = MegatronLMPlugin(other_megatron_args={"num_layers": 7, "lr": 3.0, "hidden_dropout": 0.3, "bf16": False})
    plugin.set_network_size_args(_gpt2(), IDS)
    plugin.set_optimizer_type(torch.optim.SGD(parameter(), lr=0.1))
    plugin.set_mixed_precision("bf16")
    found = plugin.megatron_lm_default_args
    assert {name: found[name] for name in plugin.other_megatron_args or {}} == plugin.other_megatron_args
    assert "embedding_dropout" not in found


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"recompute_method='all'.*'uniform', 'block'"):
        MegatronLMPlugin(recompute_method="all")


@pytest.mark.parametrize(
    ("precision", "expected"), [("fp16", {"fp16": True}), ("bf16", {"bf16": True, "DDP_impl": "local"}), ("no", {})]
)
def test_precision(precision: str, expected: dict[str, Any]) -> None:
    assert added(MegatronLMPlugin(), "set_mixed_precision", precision) == expected


def test_batches() -> None:
    assert added(MegatronLMPlugin(num_micro_batches=4), "set_training_args", 2, 3) == {
        "data_parallel_size": 3,
        "micro_batch_size": 2,
        "global_batch_size": 24,
    }


def test_optimizers() -> None:
    adam = torch.optim.AdamW(parameter(), lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
    assert added(MegatronLMPlugin(), "set_optimizer_type", adam) == {
        "optimizer": "adam",
        "adam_beta1": 0.8,
        "adam_beta2": 0.9,
        "adam_eps": 1e-6,
        "decoupled_weight_decay": True,
        "lr": 0.1,
        "weight_decay": 0.2,
    }
    sgd = torch.optim.SGD(parameter(), lr=0.1, momentum=0.9)
    expected = {"optimizer": "sgd", "sgd_momentum": 0.9, "lr": 0.1, "weight_decay": 0}
    assert added(MegatronLMPlugin(), "set_optimizer_type", sgd) == expected
    with pytest.raises(ConfigurationError, match=r"RMSprop is not an optimizer of Megatron-LM. Use Adam"):
        MegatronLMPlugin().set_optimizer_type(torch.optim.RMSprop(parameter()))
    with pytest.raises(ConfigurationError, match=r"NAdam is not an optimizer of Megatron-LM"):
        MegatronLMPlugin().set_optimizer_type(torch.optim.NAdam(parameter()))
    plain = added(MegatronLMPlugin(), "set_optimizer_type", torch.optim.Adam(parameter()))
    assert plain["decoupled_weight_decay"] is False


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda p: torch.optim.Adam(p, amsgrad=True), "Adam(amsgrad=True)"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True), "SGD(nesterov=True)"),
        (lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5), "SGD(dampening=0.5)"),
    ],
)
def test_what_an_optimizer_of_the_engine_does_not_do_is_refused(make: Any, given: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"{re.escape(given)} is nothing that the optimizers of Megatron-LM do"
    ):
        MegatronLMPlugin().set_optimizer_type(make(parameter()))


SCHEDULER = SimpleNamespace(total_num_steps=100, warmup_num_steps=10)


@pytest.mark.parametrize(
    ("options", "steps", "warmup", "warmup_samples"),
    [({}, 33, 3, 0), ({"train_iters": 50}, 50, 3, 0), ({"lr_warmup_iters": 5}, 33, 5, None)],
)
def test_schedules(options: dict[str, Any], steps: int, warmup: int, warmup_samples: int | None) -> None:
    plugin = MegatronLMPlugin(lr_decay_iters=9, min_lr=0.1, **options)
    plugin.set_training_args(2, 3)
    schedule = added(plugin, "set_scheduler_args", SCHEDULER)
    assert (schedule["train_iters"], schedule["lr_warmup_iters"]) == (steps, warmup)
    assert schedule["lr_warmup_samples"] == warmup_samples
    assert (schedule["lr_decay_iters"], schedule["min_lr"], schedule["lr_decay_style"]) == (9, 0.1, "linear")


def test_a_schedule_in_steps_leaves_samples_out() -> None:
    plugin = MegatronLMPlugin(train_samples=1000, lr_warmup_samples=3)
    plugin.set_training_args(2, 3)
    with pytest.warns(UserWarning, match=r"is left out: the scheduler gives steps") as seen:
        plugin.set_scheduler_args(SCHEDULER)
    assert [str(entry.message).split("(")[1].split(")")[0] for entry in seen] == [
        "train_samples=1000",
        "lr_warmup_samples=3",
    ]
    assert {entry.filename for entry in seen} == {__file__}
    assert (plugin.train_samples, plugin.lr_warmup_samples) == (None, 0)


@pytest.mark.parametrize(
    ("options", "warmup", "expected"),
    [
        ({"lr_warmup_fraction": 0.1}, 0, (None, None, 0.1)),
        ({"lr_warmup_samples": 9}, 0, (None, 9, None)),
        ({"lr_warmup_fraction": 0.1}, 6, (2, 0, None)),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is left out:UserWarning")
def test_a_scheduler_without_warmup_leaves_that_to_the_plugin(
    options: dict[str, Any], warmup: int, expected: tuple[Any, ...]
) -> None:
    plugin = MegatronLMPlugin(**options)
    plugin.set_training_args(2, 3)
    plugin.set_scheduler_args(SimpleNamespace(total_num_steps=None, warmup_num_steps=warmup))
    assert (plugin.lr_warmup_iters, plugin.lr_warmup_samples, plugin.lr_warmup_fraction) == expected
    assert plugin.train_iters is None


def test_a_scheduler_that_computes_itself_is_refused() -> None:
    optimizer = torch.optim.SGD(parameter(), lr=0.1)
    plugin = MegatronLMPlugin()
    plugin.set_training_args(2, 3)
    with pytest.raises(ConfigurationError, match=r"LinearLR does not say how many.*MegatronLMDummyScheduler\("):
        plugin.set_scheduler_args(torch.optim.lr_scheduler.LinearLR(optimizer))


def _gpt2(**changes: Any) -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **changes}))


@pytest.mark.parametrize(
    ("options", "batch", "length"),
    [({}, IDS, 7), ({}, None, 16), ({"decoder_seq_length": 9}, IDS, 9), ({"seq_length": 12}, IDS, 12)],
)
def test_gpt2_and_the_length_of_its_sequences(options: dict[str, Any], batch: Any, length: int) -> None:
    assert added(MegatronLMPlugin(**options), "set_network_size_args", _gpt2(), batch) == {
        **COMMON,
        **LEARNED,
        "model_type_name": "gpt",
        "tokenizer_type": "GPT2BPETokenizer",
        "pretraining_flag": True,
        "return_logits": False,
        "seq_length": length,
        "activation_function": "gelu_tanh",
        "norm_epsilon": 1e-5,
    }


def test_two_lengths_are_told_apart() -> None:
    plugin = MegatronLMPlugin(seq_length=12, decoder_seq_length=9)
    with pytest.warns(UserWarning, match=r"seq_length=12, decoder_seq_length=9\) gives two lengths"):
        plugin.set_network_size_args(_gpt2(), IDS)
    assert plugin.megatron_lm_default_args["seq_length"] == 12


@pytest.mark.parametrize(("head", "trained"), [("ForSequenceClassification", False), ("ForPreTraining", True)])
def test_bert(head: str, trained: bool) -> None:
    config = transformers.MegatronBertConfig(**SMALL, num_labels=3)
    model = getattr(transformers, f"MegatronBert{head}")(config)
    assert added(MegatronLMPlugin(encoder_seq_length=6), "set_network_size_args", model, IDS) == {
        **COMMON,
        **LEARNED,
        "model_type_name": "bert",
        "pretraining_flag": trained,
        "bert_binary_head": trained,
        "num_tokentypes": 2,
        "num_labels": 3,
        "seq_length": 6,
        "activation_function": "gelu",
        "norm_epsilon": 1e-12,
    }


def test_llama() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    found = added(MegatronLMPlugin(return_logits=True), "set_network_size_args", model, IDS)
    assert found["tokenizer_type"] == "Llama2Tokenizer"
    assert (found["return_logits"], found["seq_length"]) == (True, 7)
    assert {name: found[name] for name in COMMON} == COMMON


@pytest.mark.parametrize(
    ("options", "batch", "lengths"),
    [
        ({}, IDS, (7, 5)),
        ({}, None, (16, 16)),
        ({"encoder_seq_length": 4}, IDS, (4, 5)),
        ({}, {"decoder_input_ids": torch.zeros(2, 6)}, (16, 6)),
    ],
)
def test_t5(options: dict[str, Any], batch: Any, lengths: tuple[int, int]) -> None:
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, vocab_size=20, n_positions=16)
    model = transformers.T5ForConditionalGeneration(config)
    found = added(MegatronLMPlugin(**options), "set_network_size_args", model, batch)
    assert (found["encoder_seq_length"], found["decoder_seq_length"]) == lengths
    assert {name: found[name] for name in COMMON} == COMMON
    assert found["model_type_name"] == "t5"


def test_glm_with_experts() -> None:
    config = transformers.Glm4MoeConfig(
        **{**SMALL, "num_hidden_layers": 3},
        num_key_value_heads=1,
        head_dim=4,
        moe_intermediate_size=5,
        n_routed_experts=4,
    )
    found = added(MegatronLMPlugin(), "set_network_size_args", SimpleNamespace(config=config), IDS)
    assert (found["num_experts"], found["moe_layer_freq"], found["num_query_groups"]) == (4, [0, 1, 1], 1)
    assert (found["num_layers"], found["seq_length"]) == (3, 7)
    assert found["rotary_base"] == config.rope_parameters["rope_theta"]


def test_other_models_are_registered() -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type="My-Opt", layers=6))
    with pytest.raises(
        ConfigurationError, match=r"type 'My-Opt' are not known.*gpt2.*add_model_config_to_megatron_parser"
    ):
        MegatronLMPlugin().set_network_size_args(model)

    @add_model_config_to_megatron_parser("opt")
    def parse(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
        megatron_lm_plugin.megatron_lm_default_args["num_layers"] = model.config.layers

    assert MODEL_CONFIGS_TO_MEGATRON_PARSERS["opt"] is parse
    assert added(MegatronLMPlugin(), "set_network_size_args", model) == {"num_layers": 6}


def test_what_a_former_model_said_is_forgotten() -> None:
    plugin = MegatronLMPlugin()
    config = transformers.Glm4MoeConfig(**SMALL, num_key_value_heads=1, n_routed_experts=4, num_experts_per_tok=2)
    plugin.set_network_size_args(SimpleNamespace(config=config), IDS)
    assert plugin.megatron_lm_default_args["num_experts"] == 4
    plugin.set_network_size_args(_gpt2(attn_pdrop=0.2), IDS)
    assert "num_experts" not in plugin.megatron_lm_default_args
    assert plugin.megatron_lm_default_args["attention_dropout"] == 0.2


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "GPT2Config",
            {"scale_attn_weights": False},
            r"GPT2Config\(scale_attn_weights=False\).*scale_attn_weights=True",
        ),
        ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx=True"),
        ("GPT2Config", {"reorder_and_upcast_attn": True}, r"reorder_and_upcast_attn=True"),
        ("GPT2Config", {"add_cross_attention": True}, r"add_cross_attention=True"),
        ("GPT2Config", {"activation_function": "tanh"}, r"activation_function='tanh'.*'gelu_new'"),
        ("MegatronBertConfig", {"is_decoder": True}, r"is_decoder=True"),
        ("LlamaConfig", {"attention_bias": True}, r"attention_bias=True.*attention_bias and mlp_bias alike"),
        ("LlamaConfig", {"mlp_bias": True}, r"attention_bias=False.*attention_bias and mlp_bias alike"),
        ("LlamaConfig", {"sliding_window": 4}, r"sliding_window=4"),
        ("LlamaConfig", {"pretraining_tp": 2}, r"pretraining_tp=2.*pretraining_tp=1"),
        ("LlamaConfig", {"hidden_act": "tanh"}, r"hidden_act='tanh'"),
        ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, r"'linear'"),
        (
            "LlamaConfig",
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8}},
            r"original_max_position_embeddings'\]=8\).*original_max_position_embeddings=8192",
        ),
        ("T5Config", {"is_encoder_decoder": False}, r"is_encoder_decoder=False"),
        ("T5Config", {"feed_forward_proj": "tanh"}, r"dense_act_fn='tanh'"),
        ("Glm4MoeConfig", {"norm_topk_prob": False}, r"norm_topk_prob=False"),
        ("Glm4MoeConfig", {"n_group": 4, "topk_group": 2}, r"topk_group=2.*twice as large"),
    ],
)
def test_settings_that_the_engine_cannot_compute_are_refused(kind: str, changes: Any, message: str) -> None:
    sizes = {"GPT2Config": GPT2, "T5Config": {"vocab_size": 20}}.get(kind, SMALL)
    model = SimpleNamespace(config=getattr(transformers, kind)(**{**sizes, **changes}))
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMPlugin().set_network_size_args(model, IDS)


def test_a_pretrained_bert_has_one_activation() -> None:
    config = transformers.MegatronBertConfig(**SMALL, hidden_act="relu")
    with pytest.raises(ConfigurationError, match=r"hidden_act='relu'.*hidden_act='gelu'"):
        MegatronLMPlugin().set_network_size_args(transformers.MegatronBertForMaskedLM(config), IDS)
    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(transformers.MegatronBertForSequenceClassification(config), IDS)
    assert plugin.megatron_lm_default_args["activation_function"] == "relu"


@pytest.mark.parametrize("kind", ["llama4_text", "glm4_moe_lite", "umt5"])
def test_models_that_only_sound_alike_are_refused(kind: str) -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type=kind))
    with pytest.raises(ConfigurationError, match=rf"type '{kind}' differ.*add_model_config_to_megatron_parser"):
        MegatronLMPlugin().set_network_size_args(model, IDS)


def test_logging_options_wait_for_the_strategy() -> None:
    assert MegatronLMPlugin(set_all_logging_options=True).set_all_logging_options is True


@pytest.mark.skipif(is_package_available("megatron.training"), reason="says what happens without Megatron-LM's trainer")
def test_logging_options_need_the_package() -> None:
    with pytest.raises(
        MissingPackageError, match=r"set_all_logging_options=True\) needs the package 'megatron.training"
    ):
        MegatronLMPlugin().set_tensorboard_logging_options()


def test_all_logging_options_are_turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_logging_args(parser: argparse.ArgumentParser) -> None:
        for name in ("--log-params-norm", "--log-throughput", "--tensorboard-queue-size"):
            parser.add_argument(name, action="store_true")

    arguments = SimpleNamespace(_add_logging_args=add_logging_args)
    monkeypatch.setitem(sys.modules, "megatron.training.arguments", arguments)
    plugin = MegatronLMPlugin()
    plugin.set_tensorboard_logging_options()
    given = plugin.megatron_lm_default_args
    assert (given["log_params_norm"], given["log_throughput"]) == (True, True)
    assert "tensorboard_queue_size" not in given
