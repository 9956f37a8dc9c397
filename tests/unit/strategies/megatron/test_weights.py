"""Fused, cut and padded weights of megatron-core become pieces that do not depend on the number of ranks, and come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate._base.errors import ConfigurationError
from accelerate.strategies.megatron.weights import (
    CutWeights,
    HeadSizes,
    Layout,
    _layout,
    global_name,
    layer_offsets,
    named_weights,
    padded_rows,
)

DEGREES = (1, 2, 3)
QKV, KV, GATED = (":q", ":k", ":v"), (":k", ":v"), (":gate", ":up")
COLUMNS = 5


@dataclass(frozen=True)
class Seat:
    """The part of a process group that says which rank of how many this is."""

    place: int
    ranks: int

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return self.ranks


def group(rank: int, ranks: int) -> Any:
    return Seat(rank, ranks)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float).reshape(shape) + 1


def words(rows: int, columns: int | None = COLUMNS) -> torch.Tensor:
    return numbers(rows) if columns is None else numbers(rows, columns)


def in_turn(parts: list[torch.Tensor], widths: list[int]) -> torch.Tensor:
    """Return rows of each part in turn, as many as its width: how Megatron lays out the heads of attention."""
    groups = parts[0].shape[0] // widths[0]
    rows = [
        part[at * width : (at + 1) * width] for at in range(groups) for part, width in zip(parts, widths, strict=True)
    ]
    return torch.cat(rows)


@dataclass(frozen=True)
class Kind:
    """A parameter: how it is cut, its whole pieces, and what Megatron holds of them on a rank."""

    layout: Layout
    pieces: list[torch.Tensor]
    held: Callable[[int, int], torch.Tensor]


def attention(queries: int, size: int, groups: int, columns: int | None = COLUMNS, *, cross: bool = False) -> Kind:
    widths = [size, size] if cross else [queries * size, size, size]
    pieces = [words(groups * width, columns) + 1000 * at for at, width in enumerate(widths)]
    layout = Layout("attention", 0, KV if cross else QKV, HeadSizes(queries, size))
    whole = in_turn(pieces, widths)
    # The ranks share out the groups of heads, which lie one after another.
    return Kind(layout, pieces, lambda rank, ranks: whole.chunk(ranks)[rank])


def gated(rows: int) -> Kind:
    pieces = [words(rows), words(rows) + 1000]

    def held(rank: int, ranks: int) -> torch.Tensor:
        return torch.cat([piece.chunk(ranks)[rank] for piece in pieces])

    return Kind(Layout("mlp", 0, GATED), pieces, held)


def vocabulary(rows: int, columns: int | None = COLUMNS) -> Kind:
    piece = words(rows, columns)

    def held(rank: int, ranks: int) -> torch.Tensor:
        padding = piece.new_zeros(padded_rows(rows, ranks) - rows, *piece.shape[1:])
        return torch.cat([piece, padding]).chunk(ranks)[rank]

    return Kind(Layout("words", 0, rows=rows), [piece], held)


def plain(dim: int | None) -> Kind:
    piece = numbers(6, 12)
    return Kind(
        Layout("plain", dim), [piece], lambda rank, ranks: piece if dim is None else piece.chunk(ranks, dim)[rank]
    )


KINDS = {
    "qkv": attention(1, 2, groups=6),
    "qkv of grouped queries": attention(3, 2, groups=6),
    "qkv of one group on each rank": attention(2, 4, groups=6),
    "bias of qkv": attention(2, 3, groups=6, columns=None),
    "kv": attention(1, 2, groups=6, cross=True),
    "gated": gated(6),
    "vocabulary that fits": vocabulary(6),
    "vocabulary with odd rows": vocabulary(11),
    "vocabulary that leaves nothing for the last": vocabulary(4),
    "bias of a vocabulary": vocabulary(11, columns=None),
    "column-parallel": plain(0),
    "row-parallel": plain(1),
    "replicated": plain(None),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_degree = pytest.mark.parametrize("ranks", DEGREES)


def held_parts(kind: Kind, ranks: int) -> list[list[torch.Tensor]]:
    """Return what each rank has of each piece."""
    return [kind.layout.split(kind.held(rank, ranks), group(rank, ranks)) for rank in range(ranks)]


@each_degree
@each_kind
def test_a_rank_gets_what_megatron_holds_there(kind: Kind, ranks: int) -> None:
    for rank in range(ranks):
        expected = kind.held(rank, ranks)
        found = kind.layout.cut(kind.pieces, torch.full_like(expected, torch.nan), group(rank, ranks))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_degree
@each_kind
def test_the_parts_of_all_ranks_are_the_whole_pieces(kind: Kind, ranks: int) -> None:
    parts = held_parts(kind, ranks)
    for piece, of_ranks in zip(kind.pieces, zip(*parts, strict=True), strict=True):
        if kind.layout.dim is None:
            assert all(torch.equal(part, piece) for part in of_ranks)
        else:
            torch.testing.assert_close(torch.cat(of_ranks, dim=kind.layout.dim), piece, rtol=0, atol=0)


@each_degree
@each_kind
def test_parts_join_to_what_was_split(kind: Kind, ranks: int) -> None:
    for rank, parts in enumerate(held_parts(kind, ranks)):
        expected = kind.held(rank, ranks)
        assert torch.equal(kind.layout.join(parts, torch.full_like(expected, torch.nan)), expected)


@each_kind
def test_weights_move_between_numbers_of_ranks(kind: Kind) -> None:
    """What three ranks hold becomes what two hold, by the whole pieces alone."""
    dim = kind.layout.dim
    parts = held_parts(kind, 3)
    pieces = [of_ranks[0] if dim is None else torch.cat(of_ranks, dim=dim) for of_ranks in zip(*parts, strict=True)]
    for rank in range(2):
        expected = kind.held(rank, 2)
        assert torch.equal(kind.layout.cut(pieces, expected, group(rank, 2)), expected)


def test_a_state_of_another_type_keeps_it() -> None:
    kind = vocabulary(5)
    parameter = torch.ones(3, COLUMNS, dtype=torch.bfloat16)
    found = kind.layout.cut(kind.pieces, parameter, group(1, 2))
    assert found.dtype == torch.float
    assert found[-1].tolist() == [0.0] * COLUMNS


def test_a_bias_that_is_not_mapped_is_zero_and_a_weight_is_refused() -> None:
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(2, 2)})
    weights = CutWeights(model, {name: Layout(name) for name in ("layer.weight", "layer.bias")}, group(0, 1))
    weights.load_whole({"layer.weight": numbers(2, 2)}.get)
    assert torch.equal(model["layer"].weight, numbers(2, 2))
    assert model["layer"].bias.tolist() == [0.0, 0.0]
    assert weights.state().keys() == {"layer.weight", "layer.bias"}
    with pytest.raises(ConfigurationError, match=r"No weight of the model is mapped to layer\.weight"):
        weights.load_whole({"layer.bias": numbers(2)}.get)


# --- heads ------------------------------------------------------------------------------------------------------------


def test_queries_keys_and_values_of_grouped_heads_lie_group_by_group() -> None:
    heads = HeadSizes(queries_per_group=2, size=1)
    fused = torch.tensor([10.0, 11.0, 20.0, 30.0, 12.0, 13.0, 21.0, 31.0])
    queries, keys, values = heads.split(fused, has_queries=True)
    assert queries.tolist() == [10.0, 11.0, 12.0, 13.0]
    assert keys.tolist() == [20.0, 21.0]
    assert values.tolist() == [30.0, 31.0]


sizes = st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(queries=sizes, size=sizes, per_rank=sizes, ranks=st.integers(1, 4), rest=st.sampled_from([(), (1,), (3, 2)]))
def test_heads_split_and_join_for_all_sizes(
    queries: int, size: int, per_rank: int, ranks: int, rest: tuple[int, ...]
) -> None:
    heads, groups = HeadSizes(queries, size), per_rank * ranks
    whole = [numbers(groups * width * size, *rest) + 1e4 * at for at, width in enumerate((queries, 1, 1))]
    for parts in (whole, whole[1:]):
        fused = heads.join(parts)
        assert fused.shape == (sum(part.shape[0] for part in parts), *rest)
        assert fused.unique().numel() == fused.numel()
        again = heads.split(fused, has_queries=len(parts) == 3)
        assert all(torch.equal(one, other) for one, other in zip(again, parts, strict=True))
        # A rank's part of the fused weight holds its part of each.
        of_ranks = [heads.split(chunk, has_queries=len(parts) == 3) for chunk in fused.chunk(ranks)]
        joined = [torch.cat(chunks) for chunks in zip(*of_ranks, strict=True)]
        assert all(torch.equal(one, other) for one, other in zip(joined, parts, strict=True))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 40), ranks=st.integers(1, 8))
def test_any_vocabulary_is_shared_out_and_comes_back(rows: int, ranks: int) -> None:
    padded = padded_rows(rows, ranks)
    assert rows <= padded < rows + ranks
    assert padded % ranks == 0
    kind = vocabulary(rows, columns=None)
    like = torch.empty(padded // ranks)
    held = [kind.layout.cut(kind.pieces, like, group(rank, ranks)) for rank in range(ranks)]
    assert torch.cat(held).tolist() == [*kind.pieces[0].tolist(), *[0.0] * (padded - rows)]
    parts = [kind.layout.split(part, group(rank, ranks))[0] for rank, part in enumerate(held)]
    assert torch.equal(torch.cat(parts), kind.pieces[0])


# --- names ------------------------------------------------------------------------------------------------------------

CONFIG = SimpleNamespace(gated_linear_unit=True)
HEADS = HeadSizes(2, 4)


@pytest.mark.parametrize(
    ("name", "dim", "ends"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", 0, QKV),
        ("decoder.layers.0.self_attention.linear_qkv.bias", 0, QKV),
        ("decoder.layers.0.cross_attention.linear_kv.weight", 0, KV),
        ("decoder.layers.0.cross_attention.linear_q.weight", 0, ("",)),
        ("decoder.layers.0.mlp.linear_fc1.weight", 0, GATED),
        ("decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", 0, GATED),
        ("decoder.layers.0.mlp.linear_fc2.weight", 1, ("",)),
        ("decoder.layers.0.input_layernorm.weight", None, ("",)),
    ],
)
def test_a_name_says_what_is_fused(name: str, dim: int | None, ends: tuple[str, ...]) -> None:
    layout = _layout(name, dim, CONFIG, HEADS, 7)
    assert (layout.name, layout.dim, layout.rows) == (name, dim, None)
    assert layout.piece_names == [f"{name}{end}" for end in ends]
    assert layout.heads == (HEADS if "linear_qkv" in name or "linear_kv" in name else None)


@pytest.mark.parametrize(
    "name", ["embedding.word_embeddings.weight", "output_layer.bias", "lm_head.output_layer.weight"]
)
def test_a_vocabulary_has_its_true_rows(name: str) -> None:
    assert _layout(name, 0, CONFIG, HEADS, 7) == Layout(name, 0, rows=7)


def test_an_mlp_without_a_gate_is_one_piece() -> None:
    plain_config = SimpleNamespace(gated_linear_unit=False)
    assert _layout("mlp.linear_fc1.weight", 0, plain_config, HEADS, 7).pieces == ("",)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.5.mlp.linear_fc2.weight"),
        ("encoder.layers.1.mlp.linear_fc2.weight", "encoder.layers.1.mlp.linear_fc2.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.4.input_layernorm.weight",
        ),
        ("encoder.layers.0.mlp.linear_fc1.layer_norm_bias", "encoder.layers.0.pre_mlp_layernorm.bias"),
    ],
)
def test_a_name_is_the_same_on_every_stage_and_with_every_kernel(name: str, expected: str) -> None:
    assert global_name(name, {"decoder.layers": 4, "encoder.layers": 0}) == expected


class Stack(torch.nn.Module):
    """Some layers with their numbers in the whole model."""

    def __init__(self, *layer_numbers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1, bias=False) for _ in layer_numbers)
        for layer, number in zip(self.layers, layer_numbers, strict=True):
            layer.layer_number = number


def test_stacks_say_which_layer_is_their_first() -> None:
    model = torch.nn.ModuleDict({"encoder": Stack(1, 2), "decoder": Stack(4, 5), "rest": Stack()})
    assert layer_offsets(model) == {"encoder.layers": 0, "decoder.layers": 3}


def test_a_weight_with_two_names_is_named_once() -> None:
    model = Stack(1, 2)
    model.layers[1].weight = model.layers[0].weight
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("dropped", torch.ones(1), persistent=False)
    assert [name for name, _ in named_weights(model)] == ["kept", "layers.0.weight"]
