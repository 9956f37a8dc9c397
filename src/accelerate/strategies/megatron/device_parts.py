"""Which parts a model of megatron-core is built of, by the device: Megatron's own, or on the CPU those of torch.

megatron-core 0.16.1 asks for CUDA in its attention, rotary positions, norms and mappings under sequence parallelism,
recomputation, generator of random numbers, buffers of gradients and checkpoints. On the CPU:

- attention comes through the layer spec;
- what the model classes fix themselves becomes a subclass of its own class after the model is built (`cpu_layers`);
- gradients are averaged over replicas by this library, and clipped and saved by it.

Nothing of the package itself is changed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_lm_head import BertLMHead
from megatron.core.models.bert.pooler import Pooler
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.T5 import t5_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

from accelerate._base.imports import is_package_available
from accelerate.strategies.megatron import cpu_layers
from accelerate.strategies.megatron.configs import ModelArguments

CPU = "cpu"


def layer_spec(model: ModelArguments, config: Any, device_type: str) -> Any:
    """Return what the layers of a model are built of; for T5 those of the encoder and of the decoder.

    Args:
        config: A `TransformerConfig`.
    """
    family = model.family
    fused = device_type != CPU and is_package_available("transformer_engine")
    if family == "gpt":
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=fused, normalization=config.normalization
        )
    elif family == "bert":
        spec = (
            bert_layer_specs.get_bert_layer_with_transformer_engine_spec()
            if fused
            else copy.deepcopy(bert_layer_specs.bert_layer_local_spec)
        )
    else:
        kind = "transformer_engine" if fused else "local"
        sizes = {"encoder": config.num_layers, "decoder": model.num_decoder_layers}
        spec = tuple(getattr(t5_spec, f"get_t5_{side}_with_{kind}_block_spec")(size) for side, size in sizes.items())
        for block in spec if not fused else ():
            block.layer_norm = LocalSpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")
    if device_type == CPU:
        for part in spec if isinstance(spec, tuple) else (spec,):
            _use_cpu_layers(part)
    return spec


def _use_cpu_layers(spec: Any) -> None:
    """Put torch's attention, norms and additions into the layers of a spec."""
    if isinstance(spec, TransformerBlockSubmodules):
        spec.layer_norm = WrappedTorchNorm
    layers = spec.layer_specs if isinstance(spec, TransformerBlockSubmodules) else [spec]
    for layer in {id(layer): layer for layer in layers}.values():
        parts = layer.submodules
        for name in ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"):
            if getattr(parts, name) is not IdentityOp:
                setattr(parts, name, WrappedTorchNorm)
        for name in ("self_attn_bda", "cross_attn_bda", "mlp_bda"):
            if getattr(parts, name) is get_bias_dropout_add:
                setattr(parts, name, cpu_layers.get_bias_dropout_add)
        for name in ("self_attention", "cross_attention"):
            attention = getattr(parts, name)
            if getattr(attention, "submodules", None) is not None:
                attention.submodules.core_attention = cpu_layers.CpuDotProductAttention


def building_config(config: Any, device_type: str) -> Any:
    """Return the configuration to build a model with.

    Norms of torch refuse sequence parallelism when they are made, and attention that recomputes asks for CUDA: on the CPU
    `adapt` brings both in after the model is built.
    """
    if device_type != CPU:
        return config
    plain = copy.copy(config)
    plain.sequence_parallel = False
    plain.recompute_granularity = None
    return plain


class CpuPooler(Pooler):  # type: ignore[misc]
    """The pooler of BERT; the stock one gathers sequences in a buffer of the GPU."""

    def forward(self, hidden_states: torch.Tensor, sequence_index: int = 0) -> torch.Tensor:
        """Return the pooled state of one position."""
        if self.sequence_parallel:
            hidden_states = cpu_layers.gather(hidden_states, self.group, sums=False)
        return torch.tanh(self.dense(hidden_states[sequence_index]))


_CPU_CLASSES: dict[type, type] = {
    ColumnParallelLinear: cpu_layers.CpuColumnParallelLinear,
    DotProductAttention: cpu_layers.CpuDotProductAttention,
    RowParallelLinear: cpu_layers.CpuRowParallelLinear,
    VocabParallelEmbedding: cpu_layers.CpuVocabParallelEmbedding,
    LanguageModelEmbedding: cpu_layers.CpuLanguageModelEmbedding,
    RotaryEmbedding: cpu_layers.CpuRotaryEmbedding,
    TransformerBlock: cpu_layers.CpuTransformerBlock,
    Pooler: CpuPooler,
}


def adapt(model: torch.nn.Module, config: Any, device_type: str, tp_group: Any) -> None:
    """Let a model that was built run on its device: on the CPU, layers that ask for CUDA become torch's.

    Args:
        config: The configuration of the run; the model may have been built with `building_config`.
        tp_group: The ranks that split each layer.
    """
    if device_type != CPU:
        return
    splits_sequences = bool(config.sequence_parallel)
    for module in model.modules():
        # The classes of Megatron are fixed inside of its models; a subclass with the same parameters takes their place.
        module.__class__ = _CPU_CLASSES.get(type(module), type(module))
        if isinstance(module, TransformerBlock):
            module.splits_sequences = splits_sequences
            module.config = copy.copy(config)
            module.config.sequence_parallel = False  # with it, the stock block asks for the GPU's generator
        elif hasattr(module, "config"):
            module.config = config
        if isinstance(module, Pooler):
            module.group = tp_group
    if splits_sequences:
        _split_sequences(model)


def _split_sequences(model: torch.nn.Module) -> None:
    """Turn sequence parallelism on in a model that was built without."""
    for module in model.modules():
        match module:
            case ColumnParallelLinear():
                module.sequence_parallel, module.allreduce_dgrad = True, False
            case RowParallelLinear():
                module.sequence_parallel = True
                _mark(module.bias)
            case Pooler():
                module.sequence_parallel = True
            case LanguageModelEmbedding():
                positions = module.add_position_embedding or module.num_tokentypes > 0
                module.reduce_scatter_embeddings = not positions and module.scatter_to_sequence_parallel
                module.word_embeddings.reduce_scatter_embeddings = module.reduce_scatter_embeddings
            case torch.nn.LayerNorm() | torch.nn.RMSNorm():
                _mark(module.weight, getattr(module, "bias", None))
            case BertLMHead():
                _mark(module.dense.weight, module.dense.bias)


def _mark(*parameters: torch.Tensor | None) -> None:
    """Say that a parameter sees a part of each sequence on a rank, so that its gradients are summed over the ranks."""
    for parameter in parameters:
        if parameter is not None:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def summed_over_ranks(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters that all ranks of a layer hold, and whose gradients are parts of a sum on each of them."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        # A rank norms the queries and keys of its own heads.
        if getattr(parameter, "sequence_parallel", False) or "q_layernorm." in name or "k_layernorm." in name
    ]
