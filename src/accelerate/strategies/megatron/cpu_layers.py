"""The layers of megatron-core that ask for CUDA, as torch computes them on the CPU (megatron-core 0.16.1).

Each is a subclass of the stock layer with the same parameters, so a model, its weights and its checkpoints are the same
on every device. `device_parts` puts them into a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlock
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# --- one tensor on many ranks -----------------------------------------------------------------------------------------


def gather_parts(part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return the parts of all ranks of a group, one after another along a dimension."""
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def own_part(whole: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of what all ranks of a group hold."""
    return whole.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def sum_to_parts(whole: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """Return this rank's part of the sum over a group; gloo has no scatter of sums."""
    total = whole.contiguous().clone()
    dist.all_reduce(total, group=group)
    return own_part(total, group, dim)


class _GatherParts(torch.autograd.Function):
    """Parts of the ranks become the whole. Its gradient is summed over ranks, or is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, dim: int, sums: bool) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.sums = group, dim, sums
        return gather_parts(part, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        give = sum_to_parts if ctx.sums else own_part
        return give(gradient, ctx.group, ctx.dim), None, None, None


class _ScatterParts(torch.autograd.Function):
    """The whole becomes parts; `sums` adds up what the ranks hold first."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup, dim: int, sums: bool) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        give = sum_to_parts if sums else own_part
        return give(whole, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gather_parts(gradient, ctx.group, ctx.dim), None, None, None


def gather(part: torch.Tensor, group: dist.ProcessGroup, *, dim: int = 0, sums: bool) -> torch.Tensor:
    """Bring the parts of all ranks together.

    Args:
        sums: Every rank goes on with a computation of its own, so gradients are summed; otherwise all do the same.
    """
    whole: torch.Tensor = _GatherParts.apply(part, group, dim, sums)  # type: ignore[no-untyped-call]
    return whole


def scatter(whole: torch.Tensor, group: dist.ProcessGroup, *, dim: int = 0, sums: bool = False) -> torch.Tensor:
    """Keep this rank's part; `sums` adds up what the ranks hold first."""
    part: torch.Tensor = _ScatterParts.apply(whole, group, dim, sums)  # type: ignore[no-untyped-call]
    return part


@contextmanager
def draws_of_rank(group: dist.ProcessGroup) -> Iterator[None]:
    """Let the ranks of a group, which otherwise draw the same numbers, draw different ones.

    The seed is drawn from the generator that they share, so a resumed run draws the same again.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + group.rank())
        yield


# --- layers -----------------------------------------------------------------------------------------------------------


class CpuColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer whose outputs are split; the stock one gathers sequences in a buffer of the GPU."""

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *args: Any,
        bias: torch.Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        if sequence_parallel:
            input = gather(input, self.tp_group, sums=True)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        return functional.linear(input, weight, bias)


class CpuRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A linear layer whose inputs are split; the stock one scatters sequences in a buffer of the GPU."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the outputs, and the bias where it is added later."""
        part = input_ if self.input_is_parallel else scatter(input_, self.tp_group, dim=-1)
        output = functional.linear(part, self.weight)
        if self.explicit_expert_comm:
            return output, self.bias
        if self.sequence_parallel:
            output = scatter(output, self.tp_group, sums=True)
        else:
            output = reduce_from_tensor_model_parallel_region(output, group=self.tp_group)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


class CpuVocabParallelEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Word embeddings split by words; the stock one scatters sequences in a buffer of the GPU."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of words; those of other ranks come from them."""
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        found = functional.embedding((input_ - self.vocab_start_index).masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            return scatter(found.transpose(0, 1), self.tp_group, sums=True)
        embeddings: torch.Tensor = reduce_from_tensor_model_parallel_region(found, group=self.tp_group)
        return embeddings


class CpuLanguageModelEmbedding(LanguageModelEmbedding):  # type: ignore[misc]
    """Embeddings of words, positions and token types; the stock one draws dropout from the GPU's generator."""

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, tokentype_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the embeddings, with the sequence first."""
        embeddings = self.word_embeddings(input_ids)
        if self.add_position_embedding:
            embeddings = embeddings + self.position_embeddings(position_ids)
        if not self.reduce_scatter_embeddings:
            embeddings = embeddings.transpose(0, 1).contiguous()
        if self.tokentype_embeddings is not None and tokentype_ids is not None:
            embeddings = embeddings + self.tokentype_embeddings(tokentype_ids).transpose(0, 1)
        if not self.config.sequence_parallel:
            dropped: torch.Tensor = self.embedding_dropout(embeddings)
            return dropped
        if not self.reduce_scatter_embeddings and self.scatter_to_sequence_parallel:
            embeddings = scatter(embeddings, self.tp_group)
        with _draws(self, self.tp_group):
            parts: torch.Tensor = self.embedding_dropout(embeddings)
        return parts


class CpuRotaryEmbedding(RotaryEmbedding):  # type: ignore[misc]
    """Angles of rotary positions; the stock one moves them to the GPU, and keeps each model that it was a part of alive."""

    def forward(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor:
        """Return the angles for all positions."""
        return self.get_emb(max_seq_len, offset)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return the angles for all positions."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        if self.rotary_interleaved:
            repeated = torch.stack((angles.view(-1, 1), angles.view(-1, 1)), dim=-1).view(angles.shape[0], -1)
        else:
            repeated = torch.cat((angles, angles), dim=-1)
        return repeated[:, None, None, :]


class CpuDotProductAttention(DotProductAttention):  # type: ignore[misc]
    """Attention by torch's own kernel; the stock one works in a buffer of the GPU."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Return the attention's outputs `[s, b, heads * size]`; in a mask, True marks what is not looked at."""
        recomputes = self.config.recompute_granularity == "selective" and self.training
        # The keys and values of grouped queries serve several heads each.
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        is_causal = (attn_mask_type or self.attn_mask_type) == AttnMaskType.causal

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            mask = _additive_mask(attention_mask, attention_bias, query)
            if mask is not None and is_causal and attention_mask is None:
                hidden = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).triu(1)
                mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
            with _draws(self, self.tp_group):
                return functional.scaled_dot_product_attention(
                    query,
                    key,
                    value,
                    attn_mask=mask,
                    dropout_p=self.attention_dropout.p if self.training else 0.0,
                    is_causal=is_causal and mask is None,
                    scale=self.softmax_scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )

        context: torch.Tensor = checkpoint(attend, *heads, use_reentrant=False) if recomputes else attend(*heads)
        return context.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], self.hidden_size_per_partition)


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return what adds a layer's output to the states; under autocast these stay in 32 bits, unlike with the stock one."""

    def add(output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float) -> torch.Tensor:
        states, bias = output
        states = states if bias is None else states + bias
        return residual + functional.dropout(states, prob, training)

    return add


def _additive_mask(hidden: torch.Tensor | None, bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """Return what is added to the scores: the smallest number for what is not looked at, and the bias."""
    lowest = torch.finfo(like.dtype).min
    if hidden is None:
        return None if bias is None else bias.to(like.dtype)
    if bias is None:
        return torch.zeros(hidden.shape, dtype=like.dtype).masked_fill(hidden, lowest)
    return bias.to(like.dtype).masked_fill(hidden, lowest)


def _draws(module: torch.nn.Module, group: dist.ProcessGroup) -> Any:
    """Return a context with draws of this rank alone, where a module draws at all."""
    return draws_of_rank(group) if module.training and group.size() > 1 else nullcontext()


class CpuTransformerBlock(TransformerBlock):  # type: ignore[misc]
    """A stack of layers; the stock one recomputes activations with the GPU's generator."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the layers; ranks that hold other positions of a sequence draw other numbers."""
        with _draws(self, self.tp_group) if self.splits_sequences else nullcontext():
            hidden: torch.Tensor = super().forward(*args, **kwargs)
        return hidden

    def _checkpointed_forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        context: torch.Tensor | None,
        context_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None,
        attention_bias: torch.Tensor | None,
        packed_seq_params: Any,
        use_inner_quantization_context: bool,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        def run(begin: int, end: int) -> Callable[[torch.Tensor, torch.Tensor | None], Any]:
            def layers(hidden: torch.Tensor, context: torch.Tensor | None) -> Any:
                for index in range(begin, end):
                    hidden, context = self.layers[index](
                        hidden_states=hidden,
                        attention_mask=attention_mask,
                        context=context,
                        context_mask=context_mask,
                        rotary_pos_emb=rotary_pos_emb,
                        attention_bias=attention_bias,
                        inference_context=None,
                        packed_seq_params=packed_seq_params,
                        padding_mask=padding_mask,
                    )
                return hidden, context

            return layers

        count, step = len(self.layers), self.config.recompute_num_layers or 1
        if self.config.recompute_method == "uniform":
            spans = [(begin, min(begin + step, count), True) for begin in range(0, count, step)]
        else:
            spans = [(index, index + 1, index < step) for index in range(count)]
        for begin, end, again in spans:
            layers = run(begin, end)
            if again:
                hidden_states, context = checkpoint(layers, hidden_states, context, use_reentrant=False)
            else:
                hidden_states, context = layers(hidden_states, context)
        return hidden_states
