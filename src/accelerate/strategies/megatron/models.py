"""Models of megatron-core for what Transformers calls GPT-2, Llama, GLM-4 with experts, BERT and T5."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.T5.t5_model import T5LMHead, T5Model
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from accelerate.strategies.megatron import cpu_layers, device_parts
from accelerate.strategies.megatron.configs import MegatronConfigs


class TrueVocabulary:
    """What a language model of Megatron does so that words which pad its vocabulary have no probability."""

    vocab_rows: int
    """The words without those that pad."""

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the losses `[b, s]` of labels `[b, s]` and of logits `[s, b, words of this rank]`."""
        hidden = self.hide_padding(logits.float()).contiguous()
        losses: torch.Tensor = vocab_parallel_cross_entropy(hidden, labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1).contiguous()

    def hide_padding(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits with the smallest number for words that pad the vocabulary."""
        group: dist.ProcessGroup = self.tp_group  # type: ignore[attr-defined]
        words = logits.shape[-1]
        own = self.vocab_rows - group.rank() * words
        if own >= words:
            return logits
        padding = torch.arange(words, device=logits.device) >= own
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min)

    def all_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of all words, from those of this rank's words."""
        group: dist.ProcessGroup = self.tp_group  # type: ignore[attr-defined]
        return cpu_layers.gather(logits, group, dim=-1, sums=False)[..., : self.vocab_rows]


class GPT(TrueVocabulary, GPTModel):  # type: ignore[misc]
    """A decoder: GPT-2, Llama and their relatives."""


class Bert(TrueVocabulary, BertModel):  # type: ignore[misc]
    """An encoder with heads for masked words and for the next sentence, or with a classifier alone."""

    num_labels: int | None = None

    def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
        attention = self.transformer_layer_spec.submodules.self_attention.submodules.core_attention
        if attention is cpu_layers.CpuDotProductAttention:
            return "b11s"  # one row for all words; the stock check needs Transformer Engine
        found: str = super()._sanity_check_attention_and_get_attn_mask_dimension()
        return found

    def use_classifier(self, num_labels: int) -> None:
        """Put a classifier of the pooled state in the place of the heads of pre-training."""
        self.num_labels = num_labels
        self.binary_head = Classifier(self.config.hidden_size, num_labels, self.config.hidden_dropout)
        self.lm_head = NoStates()
        self.output_layer = NoWords()


class Classifier(torch.nn.Linear):
    """Scores of classes; some of the pooled state is dropped before, as Transformers' models do."""

    def __init__(self, size: int, num_labels: int, dropout: float) -> None:
        super().__init__(size, num_labels)
        self.dropout = dropout

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        return super().forward(torch.nn.functional.dropout(input, self.dropout, self.training))


class NoStates(torch.nn.Module):
    """Stand in the place of a head whose states nobody looks at."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the first entries of the states."""
        return hidden_states[..., :1]


class NoWords(torch.nn.Module):
    """Stand in the place of the layer that gives words their scores, where nobody asks for them."""

    weight = None

    def forward(self, hidden: torch.Tensor, weight: Any = None) -> tuple[torch.Tensor, None]:
        """Return what is given."""
        return hidden, None


class ScaledHead(T5LMHead):  # type: ignore[misc]
    """The head of a T5 whose states are scaled before it."""

    scale: float

    def forward(self, hidden_states: torch.Tensor, word_embeddings_weight: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = super().forward(hidden_states * self.scale, word_embeddings_weight)
        return logits


class T5(TrueVocabulary, T5Model):  # type: ignore[misc]
    """An encoder and a decoder, whole on each rank of a pipeline.

    The stock forward pass gathers the gradients of relative positions in a buffer of the GPU (megatron-core 0.16.1).
    """

    def forward(
        self,
        encoder_input_ids: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        encoder_attn_mask: torch.Tensor | None,
        decoder_attn_mask: torch.Tensor | None,
        encoder_decoder_attn_mask: torch.Tensor | None,
        lm_labels: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the logits `[b, s, words of this rank]`, or the losses of `lm_labels`."""
        if encoder_hidden_states is None:
            encoder_hidden_states = self.encoder(
                hidden_states=self._embed(encoder_input_ids),
                attention_mask=encoder_attn_mask,
                attention_bias=self._bias("encoder", encoder_input_ids.shape[1]),
            )
        hidden = self.decoder(
            hidden_states=self._embed(decoder_input_ids),
            attention_mask=decoder_attn_mask,
            context=encoder_hidden_states,
            context_mask=encoder_decoder_attn_mask,
            attention_bias=self._bias("decoder", decoder_input_ids.shape[1]),
        )
        shared = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits = self.lm_head(hidden, shared)
        if lm_labels is not None:
            losses: torch.Tensor = self.compute_language_model_loss(lm_labels, logits)
            return losses
        found: torch.Tensor = logits.transpose(0, 1).contiguous()
        return found

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        embedded: torch.Tensor = self.embedding(input_ids=ids, position_ids=positions)
        return embedded

    def _bias(self, side: str, length: int) -> torch.Tensor | None:
        """Return what relative positions add to the scores of this rank's heads."""
        if self.position_embedding_type != "relative":
            return None
        bias = getattr(self, f"{side}_relative_pos_emb")(length, length)
        return cpu_layers.scatter(bias, self.tp_group, dim=1) if self.tp_group.size() > 1 else bias


def build(configs: MegatronConfigs, device: torch.device, *, pre_process: bool, post_process: bool) -> torch.nn.Module:
    """Return this rank's part of a model, on its device.

    Args:
        pre_process: It begins with the embeddings: the first stage of a pipeline.
        post_process: It ends with the words: the last stage.
    """
    makers = {"gpt": _build_gpt, "bert": _build_bert, "t5": _build_t5}
    config = device_parts.building_config(configs.transformer, device.type)
    spec = device_parts.layer_spec(configs.model, config, device.type)
    model = makers[configs.model.family](
        configs, config, spec, {"pre_process": pre_process, "post_process": post_process}
    )
    model.vocab_rows = configs.model.vocab_size
    if pre_process:
        model.embedding.embedding_dropout.p = configs.model.embedding_dropout
    device_parts.adapt(model, configs.transformer, device.type, model.tp_group)
    placed: torch.nn.Module = model.to(device)
    return placed


def take_over(model: Any, configs: MegatronConfigs, device: torch.device) -> torch.nn.Module:
    """Let a model that a function of the program built run on its device; its own weights stay.

    A model of one of Megatron's own classes learns which words pad its vocabulary.
    """
    model.__class__ = {GPTModel: GPT, BertModel: Bert, T5Model: T5}.get(type(model), type(model))
    model.vocab_rows = configs.model.vocab_size
    device_parts.adapt(model, model.config, device.type, getattr(model, "tp_group", None))
    placed: torch.nn.Module = model.to(device)
    return placed


def _common(configs: MegatronConfigs, config: Any, stage: dict[str, bool]) -> dict[str, Any]:
    arguments = configs.model
    return {
        "config": config,
        "vocab_size": arguments.padded_vocab_size,
        "max_sequence_length": arguments.max_sequence_length,
        "share_embeddings_and_output_weights": arguments.share_embeddings,
        "position_embedding_type": arguments.position_embedding_type,
        "parallel_output": True,
        **stage,
    }


def _build_gpt(configs: MegatronConfigs, config: Any, spec: Any, stage: dict[str, bool]) -> Any:
    arguments = configs.model
    return GPT(
        transformer_layer_spec=spec,
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
        rope_scaling=arguments.rope_scaling,
        rope_scaling_factor=arguments.rope_scaling_factor,
        seq_len_interpolation_factor=arguments.seq_len_interpolation_factor,
        **_common(configs, config, stage),
    )


def _build_bert(configs: MegatronConfigs, config: Any, spec: Any, stage: dict[str, bool]) -> Any:
    arguments = configs.model
    model = Bert(
        num_tokentypes=arguments.num_tokentypes,
        transformer_layer_spec=spec,
        add_binary_head=arguments.add_binary_head or not arguments.is_pretraining,
        **_common(configs, config, stage),
    )
    if not arguments.is_pretraining and stage["post_process"]:
        model.use_classifier(arguments.num_labels)
    return model


def _build_t5(configs: MegatronConfigs, config: Any, spec: Any, stage: dict[str, bool]) -> Any:
    arguments = configs.model
    encoder, decoder = spec
    encoder_config, config = config, copy.copy(config)
    config.num_layers = arguments.num_decoder_layers
    model = T5(
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=encoder,
        transformer_decoder_layer_spec=decoder,
        relative_attention_num_buckets=arguments.relative_attention_num_buckets,
        relative_attention_max_distance=arguments.relative_attention_max_distance,
        **_common(configs, config, stage),
    )
    if arguments.share_embeddings and stage["post_process"]:
        model.lm_head.output_layer.bias = None  # Transformers' T5 has none
    if arguments.output_scale != 1.0 and stage["post_process"]:
        model.lm_head.__class__ = ScaledHead
        model.lm_head.scale = arguments.output_scale
    return model
