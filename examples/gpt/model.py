"""A small GPT, written so that it can be laid out over ranks in every way."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from accelerate.utils import MegatronLMPlugin, add_model_config_to_megatron_parser


@dataclass
class Shape:
    vocabulary: int = 256
    length: int = 128
    width: int = 64
    heads: int = 4
    blocks: int = 4
    model_type: str = "example-gpt"


class Block(nn.Module):
    """Attention, then two linear layers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(states)
        # The number of heads is left open: with layers split over ranks, each rank has some of them.
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.out(attended.transpose(1, 2).flatten(2))
        return states + self.down(functional.gelu(self.up(self.norm(states))))


class Embedding(nn.Module):
    """Tokens and their positions, which are given where a rank has a part of the sequence only."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)


class Head(nn.Module):
    """Scores of the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.scores = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.scores(self.norm(states))


class GPT(nn.Module):
    # How layers are split over ranks (tp_size): columns, then rows, so that one sum a pair of layers is enough.
    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.query": "colwise",
        "blocks.*.key": "colwise",
        "blocks.*.value": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head.scores": "colwise_rep",
    }

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.config = shape
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.head = Head(shape)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean loss, or the scores if there are no targets."""
        states = self.embedding(tokens, positions)
        for block in self.blocks:
            states = block(states)
        scores = self.head(states)
        return scores if targets is None else self.pipeline_loss(scores, targets)

    # How the model is cut into stages (pp_size).
    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def pipeline_loss(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


# How Megatron-LM builds the model (use_megatron_lm): its sizes, what its arguments are called, and where its weights go.
@add_model_config_to_megatron_parser("example-gpt")
def describe(megatron_lm_plugin: MegatronLMPlugin, model: GPT, batch_data: object) -> None:
    shape = model.config
    weights = {
        "embedding.tokens.weight": "embedding.word_embeddings.weight",
        "embedding.positions.weight": "embedding.position_embeddings.weight",
        "head.norm.weight": "decoder.final_layernorm.weight",
        "head.norm.bias": "decoder.final_layernorm.bias",
        "head.scores.weight": "output_layer.weight",
    }
    for index in range(shape.blocks):
        block, layer = f"blocks.{index}", f"decoder.layers.{index}"
        for theirs, ours in (("query", "q"), ("key", "k"), ("value", "v")):
            weights[f"{block}.{theirs}.weight"] = f"{layer}.self_attention.linear_qkv.weight:{ours}"
        weights[f"{block}.out.weight"] = f"{layer}.self_attention.linear_proj.weight"
        for kind in ("weight", "bias"):
            weights[f"{block}.attention_norm.{kind}"] = f"{layer}.input_layernorm.{kind}"
            weights[f"{block}.norm.{kind}"] = f"{layer}.pre_mlp_layernorm.{kind}"
            weights[f"{block}.up.{kind}"] = f"{layer}.mlp.linear_fc1.{kind}"
            weights[f"{block}.down.{kind}"] = f"{layer}.mlp.linear_fc2.{kind}"
    megatron_lm_plugin.megatron_lm_default_args.update(
        model_type_name="gpt",
        num_layers=shape.blocks,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        seq_length=shape.length,
        max_position_embeddings=shape.length,
        orig_vocab_size=shape.vocabulary,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        untie_embeddings_and_output_weights=True,
        # The loss is returned alone, and the targets are shifted already, as in Megatron's own data.
        model_return_dict=None,
        input_names={"targets": "labels"},
        weight_map=weights,
    )
