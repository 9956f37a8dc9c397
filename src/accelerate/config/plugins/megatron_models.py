"""What Megatron-LM must know of a Transformers model, by the model's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once

if TYPE_CHECKING:
    from accelerate.config.plugins.megatron import MegatronLMPlugin

Batch = Mapping[str, Any] | None
Parser = Callable[["MegatronLMPlugin", Any, Batch], None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}
"""The parsers by the model type, or a part of it, that each is for."""

# Names of Transformers -> names of the same functions here.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# What megatron-core computes for Llama 3's scaled positions, whatever a model says.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Register a function that writes a model's sizes into `plugin.megatron_lm_default_args`.

    Args:
        model_type: `config.model_type` of the models it is for, or a part of it.

    Example:
        >>> @add_model_config_to_megatron_parser("opt")
        ... def parse_opt_config(megatron_lm_plugin, model, batch_data):
        ...     megatron_lm_plugin.megatron_lm_default_args["num_layers"] = model.config.num_hidden_layers
    """

    def register(parser: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parser
        return parser

    return register


# --- shared steps -----------------------------------------------------------------------------------------------------


def _refuse(config: Any, name: str, value: Any, right: str) -> ConfigurationError:
    return ConfigurationError(
        f"{type(config).__name__}({name}={value!r}) is nothing that megatron-core computes, so the model would give "
        f"other numbers. Make the model with {right}, or train it without MegatronLMPlugin."
    )


def _require(config: Any, *types: str, **right: Any) -> None:
    """Refuse a model of another type that holds the name of this one, and settings other than the right ones."""
    if config.model_type not in types:
        raise ConfigurationError(
            f"Models of type {config.model_type!r} differ from those of type {types[0]!r}, the nearest that is known "
            "here. Register a parser for them with add_model_config_to_megatron_parser."
        )
    for name, value in right.items():
        found = getattr(config, name, value)
        if found != value:
            raise _refuse(config, name, found, f"{name}={value!r}")


def _activation(config: Any, name: str, *, gated: bool) -> dict[str, Any]:
    """Return the arguments of the function between the two layers of an MLP."""
    given = getattr(config, name)
    known = _ACTIVATIONS.get(given)
    if known is None:
        raise _refuse(config, name, given, f"one of {', '.join(map(repr, _ACTIVATIONS))}")
    if gated and known == "silu":
        return {"swiglu": True}
    return {"activation_function": known, "gated_linear_unit": gated}


def _rotary(config: Any) -> dict[str, Any]:
    """Return the arguments of rotary positions."""
    older = {"rope_theta": getattr(config, "rope_theta", 10000.0), **(getattr(config, "rope_scaling", None) or {})}
    rope = getattr(config, "rope_parameters", None) or older
    kind = rope.get("rope_type", rope.get("type", "default"))
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)),
        "use_rope_scaling": kind == "llama3",
    }
    if kind == "llama3":
        for name, value in _LLAMA3.items():
            if rope[name] != value:
                raise _refuse(config, f"rope_parameters[{name!r}]", rope[name], f"{name}={value!r}")
        return {**arguments, "rope_scaling_factor": rope["factor"]}
    if kind != "default":
        raise _refuse(config, "rope_parameters['rope_type']", kind, "rope_type='default' or 'llama3'")
    return arguments


def _length(batch: Batch, keys: tuple[str, ...], otherwise: int) -> int:
    """Return the length of the sequences of a batch, or another number where there are none."""
    found = next((batch[key] for key in keys if key in batch), None) if batch is not None else None
    return otherwise if found is None else int(found.shape[1])


def _sequence_length(plugin: MegatronLMPlugin, other: str, config: Any, batch: Batch) -> dict[str, int]:
    """Return the length of sequences: as given, else that of the batch, else the longest that the model takes."""
    alternative = getattr(plugin, other)
    if plugin.seq_length is not None and alternative not in (None, plugin.seq_length):
        warn_once(
            f"MegatronLMPlugin(seq_length={plugin.seq_length}, {other}={alternative}) gives two lengths to a model "
            "that has one kind of sequence; seq_length is taken. Give one of them.",
            stacklevel=5,
        )
    if plugin.seq_length is None:
        longest = config.max_position_embeddings
        plugin.seq_length = alternative or _length(batch, ("input_ids",), longest)
    return {"seq_length": plugin.seq_length}


def _common(
    plugin: MegatronLMPlugin, config: Any, kind: str, *, dropouts: tuple[float, float, float], **changes: Any
) -> None:
    """Write down what every kind of model has.

    Args:
        dropouts: Those of attention, of hidden states and of embeddings; they hold where nobody gave another.
        changes: What is this model's own.
    """
    arguments = plugin.megatron_lm_default_args
    sizes = {
        "model_type_name": kind,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "pretraining_flag": True,
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": getattr(config, "return_dict", True),
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
    }
    if "max_position_embeddings" not in changes:
        sizes["max_position_embeddings"] = config.max_position_embeddings
    arguments.update({**sizes, **changes})
    attention, hidden, embedding = dropouts
    if "hidden_dropout" not in arguments:
        arguments.update(hidden_dropout=hidden, embedding_dropout=embedding)
    arguments.setdefault("attention_dropout", attention)


def _decoder(plugin: MegatronLMPlugin, model: Any, batch: Batch, **changes: Any) -> None:
    changes |= _sequence_length(plugin, "decoder_seq_length", model.config, batch)
    _common(plugin, model.config, "gpt", return_logits=plugin.return_logits, **changes)


# --- models -----------------------------------------------------------------------------------------------------------


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Batch) -> None:
    """Write down the sizes of a BERT; one with a pre-training or masked-word head is pre-trained."""
    config, head = model.config, type(model).__name__.lower()
    _require(config, "megatron-bert", is_decoder=False, add_cross_attention=False)
    trained = "pretraining" in head or "maskedlm" in head
    if trained and _ACTIVATIONS.get(config.hidden_act) != "gelu":
        # The head that predicts words has a function of its own in megatron-core, which is always this one.
        raise _refuse(config, "hidden_act", config.hidden_act, "hidden_act='gelu'")
    _common(
        megatron_lm_plugin,
        config,
        "bert",
        pretraining_flag=trained,
        num_labels=config.num_labels,
        num_tokentypes=config.type_vocab_size,
        bert_binary_head="pretraining" in head or "nextsentence" in head,
        ffn_hidden_size=config.intermediate_size,
        normalization="LayerNorm",
        norm_epsilon=config.layer_norm_eps,
        add_bias_linear=True,
        add_qkv_bias=True,
        position_embedding_type="learned_absolute",
        dropouts=(config.attention_probs_dropout_prob, config.hidden_dropout_prob, config.hidden_dropout_prob),
        **_activation(config, "hidden_act", gated=False),
        **_sequence_length(megatron_lm_plugin, "encoder_seq_length", config, batch_data),
    )


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Batch) -> None:
    """Write down the sizes of a GPT-2."""
    config = model.config
    right = {"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False}
    _require(config, "gpt2", scale_attn_weights=True, **right)
    _decoder(
        megatron_lm_plugin,
        model,
        batch_data,
        tokenizer_type="GPT2BPETokenizer",
        ffn_hidden_size=config.n_inner or 4 * config.n_embd,
        normalization="LayerNorm",
        norm_epsilon=config.layer_norm_epsilon,
        add_bias_linear=True,
        add_qkv_bias=True,
        position_embedding_type="learned_absolute",
        dropouts=(config.attn_pdrop, config.resid_pdrop, config.embd_pdrop),
        **_activation(config, "activation_function", gated=False),
    )


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Batch) -> None:
    """Write down the sizes of a T5, whose two kinds of sequence have lengths of their own."""
    plugin, config = megatron_lm_plugin, model.config
    _require(config, "t5", "mt5", is_encoder_decoder=True)
    # Relative positions set no limit; newer configurations name none.
    longest = getattr(config, "n_positions", 512)
    if plugin.encoder_seq_length is None:
        plugin.encoder_seq_length = _length(batch_data, ("input_ids",), longest)
    if plugin.decoder_seq_length is None:
        plugin.decoder_seq_length = _length(batch_data, ("labels", "decoder_input_ids"), longest)
    _common(
        plugin,
        config,
        "t5",
        max_position_embeddings=longest,
        encoder_seq_length=plugin.encoder_seq_length,
        decoder_seq_length=plugin.decoder_seq_length,
        encoder_num_layers=config.num_layers,
        decoder_num_layers=config.num_decoder_layers,
        ffn_hidden_size=config.d_ff,
        normalization="RMSNorm",
        norm_epsilon=config.layer_norm_epsilon,
        add_bias_linear=False,
        add_qkv_bias=False,
        softmax_scale=1.0,
        position_embedding_type="relative",
        relative_attention_num_buckets=config.relative_attention_num_buckets,
        relative_attention_max_distance=config.relative_attention_max_distance,
        scale_decoder_outputs=getattr(config, "scale_decoder_outputs", False),
        dropouts=(config.dropout_rate,) * 3,
        **_activation(config, "dense_act_fn", gated=config.is_gated_act),
    )


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Batch) -> None:
    """Write down the sizes of a Llama."""
    config = model.config
    _require(config, "llama", sliding_window=None)
    if config.attention_bias != config.mlp_bias:
        # Megatron-core gives biases to all layers or to none; those of attention alone would leave out the output's.
        raise _refuse(config, "attention_bias", config.attention_bias, "attention_bias and mlp_bias alike")
    if (config.pretraining_tp or 1) > 1:
        raise _refuse(config, "pretraining_tp", config.pretraining_tp, "pretraining_tp=1")
    _decoder(
        megatron_lm_plugin,
        model,
        batch_data,
        tokenizer_type="Llama2Tokenizer",
        group_query_attention=True,
        num_query_groups=config.num_key_value_heads,
        ffn_hidden_size=config.intermediate_size,
        normalization="RMSNorm",
        norm_epsilon=config.rms_norm_eps,
        add_bias_linear=config.attention_bias,
        add_qkv_bias=config.attention_bias,
        dropouts=(config.attention_dropout or 0.0, 0.0, 0.0),
        **_activation(config, "hidden_act", gated=True),
        **_rotary(config),
    )


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Batch) -> None:
    """Write down the sizes of a GLM-4 with experts: its first layers are dense, the others route to experts."""
    config = model.config
    _require(config, "glm4_moe")
    chosen, grouped = config.num_experts_per_tok, config.n_group > 1
    # Megatron-core makes the weights of the chosen experts add up to one if there are several.
    _require(config, "glm4_moe", norm_topk_prob=chosen > 1)
    if grouped and chosen // config.topk_group != 2:
        # Transformers rates a group by its two best experts, megatron-core by as many as a group gives.
        raise _refuse(config, "topk_group", config.topk_group, "num_experts_per_tok twice as large as topk_group")
    dense = config.first_k_dense_replace
    _decoder(
        megatron_lm_plugin,
        model,
        batch_data,
        tokenizer_type="HuggingFaceTokenizer",
        group_query_attention=True,
        num_query_groups=config.num_key_value_heads,
        ffn_hidden_size=config.intermediate_size,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        num_experts=config.n_routed_experts,
        moe_router_topk=chosen,
        moe_router_num_groups=config.n_group if grouped else None,
        moe_router_group_topk=config.topk_group if grouped else None,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        # Transformers holds this bias still while it trains, and has no loss that balances the experts.
        moe_router_bias_update_rate=0.0,
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        moe_shared_expert_intermediate_size=config.n_shared_experts * config.moe_intermediate_size or None,
        moe_layer_freq=[0] * dense + [1] * (config.num_hidden_layers - dense),
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
        normalization="RMSNorm",
        norm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.use_qk_norm,
        add_bias_linear=False,
        add_qkv_bias=config.attention_bias,
        dropouts=(config.attention_dropout or 0.0, 0.0, 0.0),
        **_activation(config, "hidden_act", gated=True),
        **_rotary(config),
    )
