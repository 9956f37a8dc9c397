"""What Megatron-LM must know of a Transformers model, by the model's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once

if TYPE_CHECKING:
    from accelerate.config.plugins.megatron import MegatronLMPlugin

Parser = Callable[["MegatronLMPlugin", Any, "Mapping[str, Any] | None"], None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}
"""The parsers by the model type, or a part of it, that each is for."""


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


def parser_for(model_type: str) -> Parser:
    """Return the parser of a model type.

    Raises:
        ConfigurationError: There is none.
    """
    found = [parser for name, parser in MODEL_CONFIGS_TO_MEGATRON_PARSERS.items() if name in model_type.lower()]
    if not found:
        raise ConfigurationError(
            f"Models of type {model_type!r} are not known here, so Megatron-LM cannot be told their sizes. "
            f"Known are {', '.join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)}; register another with "
            "add_model_config_to_megatron_parser."
        )
    return found[0]


def _length(batch: Mapping[str, Any] | None, keys: tuple[str, ...], otherwise: int) -> int:
    """Return the length of the sequences of a batch, or another number where there are none."""
    found = next((batch[key] for key in keys if key in batch), None) if batch is not None else None
    return otherwise if found is None else int(found.shape[1])


def _sequence_length(
    plugin: MegatronLMPlugin, other: str, config: Any, batch: Mapping[str, Any] | None
) -> dict[str, int]:
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


def _common(plugin: MegatronLMPlugin, config: Any, kind: str, **changes: Any) -> None:
    sizes = {
        "model_type_name": kind,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "pretraining_flag": True,
        "orig_vocab_size": config.vocab_size,
        "model_return_dict": getattr(config, "return_dict", True),
    }
    if "max_position_embeddings" not in changes:
        sizes["max_position_embeddings"] = config.max_position_embeddings
    plugin.megatron_lm_default_args.update({**sizes, **changes})


def _decoder(plugin: MegatronLMPlugin, model: Any, batch: Mapping[str, Any] | None, **changes: Any) -> None:
    length = _sequence_length(plugin, "decoder_seq_length", model.config, batch)
    _common(plugin, model.config, "gpt", return_logits=plugin.return_logits, **length, **changes)


@add_model_config_to_megatron_parser("megatron-bert")
def parse_bert_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Mapping[str, Any] | None) -> None:
    """Write down the sizes of a BERT; one with a pre-training or masked-word head is pre-trained."""
    head = type(model).__name__.lower()
    length = _sequence_length(megatron_lm_plugin, "encoder_seq_length", model.config, batch_data)
    trained = "pretraining" in head or "maskedlm" in head
    num_labels = model.config.num_labels
    _common(megatron_lm_plugin, model.config, "bert", pretraining_flag=trained, num_labels=num_labels, **length)


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Mapping[str, Any] | None) -> None:
    """Write down the sizes of a GPT-2."""
    _decoder(megatron_lm_plugin, model, batch_data, tokenizer_type="GPT2BPETokenizer")


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Mapping[str, Any] | None) -> None:
    """Write down the sizes of a T5, whose two kinds of sequence have lengths of their own."""
    plugin, longest = megatron_lm_plugin, model.config.n_positions
    if plugin.encoder_seq_length is None:
        plugin.encoder_seq_length = _length(batch_data, ("input_ids",), longest)
    if plugin.decoder_seq_length is None:
        plugin.decoder_seq_length = _length(batch_data, ("labels", "decoder_input_ids"), longest)
    lengths = {"encoder_seq_length": plugin.encoder_seq_length, "decoder_seq_length": plugin.decoder_seq_length}
    _common(plugin, model.config, "t5", max_position_embeddings=longest, **lengths)


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Mapping[str, Any] | None) -> None:
    """Write down the sizes of a Llama."""
    _decoder(megatron_lm_plugin, model, batch_data, tokenizer_type="Llama2Tokenizer")


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(
    megatron_lm_plugin: MegatronLMPlugin, model: Any, batch_data: Mapping[str, Any] | None
) -> None:
    """Write down the sizes of a GLM-4 with experts: its first layers are dense, the others route to experts."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or vars(config)
    dense = config.first_k_dense_replace
    _decoder(
        megatron_lm_plugin,
        model,
        batch_data,
        tokenizer_type="HuggingFaceTokenizer",
        group_query_attention=True,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        num_experts=config.n_routed_experts,
        moe_router_topk=config.num_experts_per_tok,
        moe_shared_expert_intermediate_size=config.n_shared_experts * config.moe_intermediate_size,
        moe_layer_freq=[0] * dense + [1] * (config.num_hidden_layers - dense),
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
        norm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.use_qk_norm,
        add_qkv_bias=config.attention_bias,
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        untie_embeddings_and_output_weights=not config.tie_word_embeddings,
        swiglu=True,
        normalization="RMSNorm",
    )
