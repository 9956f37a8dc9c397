"""Which weight of a Transformers model is which piece of the model that Megatron trains, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError


@dataclass(frozen=True)
class Weight:
    """One weight of a Transformers model.

    Args:
        theirs: Its name there.
        ours: The pieces that lie in it one after another, along its first dimension.
        transposed: It lies there with inputs first.
        experts: It holds so many experts, each with its share of the pieces.
    """

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    experts: int = 0

    def to_pieces(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the pieces that lie in a weight."""
        if self.experts:
            share = len(self.ours) // self.experts
            parts = [part for expert in tensor.unbind() for part in expert.chunk(share)]
        else:
            parts = list((tensor.t() if self.transposed else tensor).chunk(len(self.ours)))
        return dict(zip(self.ours, parts, strict=True))

    def from_pieces(self, pieces: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the weight."""
        parts = [pieces[name] for name in self.ours]
        if self.experts:
            share = len(parts) // self.experts
            return torch.stack([torch.cat(parts[at : at + share]) for at in range(0, len(parts), share)])
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.t().contiguous() if self.transposed else joined


def _norms(pairs: Mapping[str, str], *, bias: bool) -> Iterable[Weight]:
    for theirs, ours in pairs.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            yield Weight(f"{theirs}.{kind}", (f"{ours}.{kind}",))


def _linears(pairs: Mapping[str, tuple[str, ...]], *, bias: bool, transposed: bool = False) -> Iterable[Weight]:
    """Yield linear layers; the ends of the names on our side are the pieces of a fused one."""
    for theirs, (ours, *ends) in pairs.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            pieces = tuple(f"{ours}.{kind}{end}" for end in ends or ("",))
            yield Weight(f"{theirs}.{kind}", pieces, transposed and kind == "weight")


def _gpt2(config: Any) -> Iterable[Weight]:
    yield Weight("transformer.wte.weight", ("embedding.word_embeddings.weight",))
    yield Weight("transformer.wpe.weight", ("embedding.position_embeddings.weight",))
    for index in range(config.num_hidden_layers):
        theirs, ours = f"transformer.h.{index}", f"decoder.layers.{index}"
        norms = {f"{theirs}.ln_1": f"{ours}.input_layernorm", f"{theirs}.ln_2": f"{ours}.pre_mlp_layernorm"}
        yield from _norms(norms, bias=True)
        linears = {
            f"{theirs}.attn.c_attn": (f"{ours}.self_attention.linear_qkv", ":q", ":k", ":v"),
            f"{theirs}.attn.c_proj": (f"{ours}.self_attention.linear_proj",),
            f"{theirs}.mlp.c_fc": (f"{ours}.mlp.linear_fc1",),
            f"{theirs}.mlp.c_proj": (f"{ours}.mlp.linear_fc2",),
        }
        yield from _linears(linears, bias=True, transposed=True)
    yield from _norms({"transformer.ln_f": "decoder.final_layernorm"}, bias=True)
    yield Weight("lm_head.weight", ("output_layer.weight",))


def _decoder_layer(theirs: str, ours: str, config: Any) -> Iterable[Weight]:
    """Yield norms and attention of a layer of Llama's kind."""
    norms = {
        f"{theirs}.input_layernorm": f"{ours}.input_layernorm",
        f"{theirs}.post_attention_layernorm": f"{ours}.pre_mlp_layernorm",
    }
    if getattr(config, "use_qk_norm", False):
        norms |= {f"{theirs}.self_attn.{part}_norm": f"{ours}.self_attention.{part}_layernorm" for part in ("q", "k")}
    yield from _norms(norms, bias=False)
    fused = f"{ours}.self_attention.linear_qkv"
    linears = {f"{theirs}.self_attn.{part}_proj": (fused, f":{part}") for part in ("q", "k", "v")}
    yield from _linears(linears, bias=config.attention_bias)
    has_bias = config.attention_bias and config.model_type == "llama"
    yield from _linears({f"{theirs}.self_attn.o_proj": (f"{ours}.self_attention.linear_proj",)}, bias=has_bias)


def _gated(theirs: str, ours: str, *, bias: bool = False) -> Iterable[Weight]:
    linears: dict[str, tuple[str, ...]] = {
        f"{theirs}.gate_proj": (f"{ours}.linear_fc1", ":gate"),
        f"{theirs}.up_proj": (f"{ours}.linear_fc1", ":up"),
        f"{theirs}.down_proj": (f"{ours}.linear_fc2",),
    }
    yield from _linears(linears, bias=bias)


def _outer() -> Iterable[Weight]:
    yield Weight("model.embed_tokens.weight", ("embedding.word_embeddings.weight",))
    yield from _norms({"model.norm": "decoder.final_layernorm"}, bias=False)
    yield Weight("lm_head.weight", ("output_layer.weight",))


def _llama(config: Any) -> Iterable[Weight]:
    yield from _outer()
    for index in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{index}", f"decoder.layers.{index}"
        yield from _decoder_layer(theirs, ours, config)
        yield from _gated(f"{theirs}.mlp", f"{ours}.mlp", bias=config.mlp_bias)


def _glm4_moe(config: Any) -> Iterable[Weight]:
    yield from _outer()
    for index in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{index}", f"decoder.layers.{index}"
        yield from _decoder_layer(theirs, ours, config)
        if index < config.first_k_dense_replace:
            yield from _gated(f"{theirs}.mlp", f"{ours}.mlp")
            continue
        yield Weight(f"{theirs}.mlp.gate.weight", (f"{ours}.mlp.router.weight",))
        yield Weight(f"{theirs}.mlp.gate.e_score_correction_bias", (f"{ours}.mlp.router.expert_bias",))
        yield from _gated(f"{theirs}.mlp.shared_experts", f"{ours}.mlp.shared_experts")
        count = config.n_routed_experts
        experts = [f"{ours}.mlp.experts.local_experts.{expert}" for expert in range(count)]
        first = tuple(f"{expert}.linear_fc1.weight:{part}" for expert in experts for part in ("gate", "up"))
        yield Weight(f"{theirs}.mlp.experts.gate_up_proj", first, experts=count)
        second = tuple(f"{expert}.linear_fc2.weight" for expert in experts)
        yield Weight(f"{theirs}.mlp.experts.down_proj", second, experts=count)


def _bert(config: Any) -> Iterable[Weight]:
    for theirs, ours in (("word", "word"), ("position", "position"), ("token_type", "tokentype")):
        yield Weight(f"bert.embeddings.{theirs}_embeddings.weight", (f"embedding.{ours}_embeddings.weight",))
    for index in range(config.num_hidden_layers):
        theirs, ours = f"bert.encoder.layer.{index}", f"encoder.layers.{index}"
        norms = {f"{theirs}.attention.ln": f"{ours}.input_layernorm", f"{theirs}.ln": f"{ours}.pre_mlp_layernorm"}
        yield from _norms(norms, bias=True)
        fused = f"{ours}.self_attention.linear_qkv"
        linears: dict[str, tuple[str, ...]] = {
            f"{theirs}.attention.self.query": (fused, ":q"),
            f"{theirs}.attention.self.key": (fused, ":k"),
            f"{theirs}.attention.self.value": (fused, ":v"),
            f"{theirs}.attention.output.dense": (f"{ours}.self_attention.linear_proj",),
            f"{theirs}.intermediate.dense": (f"{ours}.mlp.linear_fc1",),
            f"{theirs}.output.dense": (f"{ours}.mlp.linear_fc2",),
        }
        yield from _linears(linears, bias=True)
    yield from _norms({"bert.encoder.ln": "encoder.final_layernorm"}, bias=True)
    heads: dict[str, tuple[str, ...]] = {
        "bert.pooler.dense": ("pooler.dense",),
        "cls.predictions.transform.dense": ("lm_head.dense",),
        "cls.predictions.transform.LayerNorm": ("lm_head.layer_norm",),
        "cls.seq_relationship": ("binary_head",),
        "classifier": ("binary_head",),
    }
    yield from _linears(heads, bias=True)
    yield Weight("cls.predictions.decoder.weight", ("output_layer.weight",))
    yield Weight("cls.predictions.bias", ("output_layer.bias",))


def _t5(config: Any) -> Iterable[Weight]:
    yield Weight("shared.weight", ("embedding.word_embeddings.weight",))
    yield Weight("lm_head.weight", ("lm_head.output_layer.weight",))
    sides = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
    for side, count in sides.items():
        first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Weight(first, (f"{side}_relative_pos_emb.relative_attention_bias.weight",))
        yield from _norms({f"{side}.final_layer_norm": f"{side}.final_layernorm"}, bias=False)
        for index in range(count):
            yield from _t5_layer(f"{side}.block.{index}.layer", f"{side}.layers.{index}", side, config)


def _t5_layer(theirs: str, ours: str, side: str, config: Any) -> Iterable[Weight]:
    last = 2 if side == "decoder" else 1
    norms = {
        f"{theirs}.0.layer_norm": f"{ours}.input_layernorm",
        f"{theirs}.{last}.layer_norm": f"{ours}.pre_mlp_layernorm",
    }
    own, cross = f"{ours}.self_attention", f"{ours}.cross_attention"
    linears: dict[str, tuple[str, ...]] = {
        **{f"{theirs}.0.SelfAttention.{part}": (f"{own}.linear_qkv", f":{part}") for part in ("q", "k", "v")},
        f"{theirs}.0.SelfAttention.o": (f"{own}.linear_proj",),
        f"{theirs}.{last}.DenseReluDense.wo": (f"{ours}.mlp.linear_fc2",),
    }
    if config.is_gated_act:
        linears[f"{theirs}.{last}.DenseReluDense.wi_0"] = (f"{ours}.mlp.linear_fc1", ":gate")
        linears[f"{theirs}.{last}.DenseReluDense.wi_1"] = (f"{ours}.mlp.linear_fc1", ":up")
    else:
        linears[f"{theirs}.{last}.DenseReluDense.wi"] = (f"{ours}.mlp.linear_fc1",)
    if side == "decoder":
        norms[f"{theirs}.1.layer_norm"] = f"{ours}.pre_cross_attn_layernorm"
        linears[f"{theirs}.1.EncDecAttention.q"] = (f"{cross}.linear_q",)
        linears |= {f"{theirs}.1.EncDecAttention.{part}": (f"{cross}.linear_kv", f":{part}") for part in ("k", "v")}
        linears[f"{theirs}.1.EncDecAttention.o"] = (f"{cross}.linear_proj",)
    yield from _norms(norms, bias=False)
    yield from _linears(linears, bias=False)


_MAPS: dict[str, Callable[[Any], Iterable[Weight]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "glm4_moe": _glm4_moe,
    "megatron-bert": _bert,
    "t5": _t5,
    "mt5": _t5,
}


@dataclass(frozen=True)
class WeightMap:
    """The weights of one Transformers model, by name, and the names that stand for the same weight.

    Args:
        weights: Those that are carried, by their names.
        pieces: Piece -> the weight in which it lies; of names for the same weight each has its piece.
        aliases: Name -> the name of the same weight that is carried.
        names: All names, in the order of the model.
    """

    weights: Mapping[str, Weight]
    pieces: Mapping[str, Weight]
    aliases: Mapping[str, str]
    names: tuple[str, ...]

    def read(self, state: Mapping[str, torch.Tensor], piece: str) -> torch.Tensor | None:
        """Return a piece of the weights in a state dict; None for a piece that is in none of them."""
        weight = self.pieces.get(piece)
        return None if weight is None else weight.to_pieces(state[weight.theirs])[piece]


def is_known(model: Any) -> bool:
    """Return whether the weights of such a model can be carried without the program saying how."""
    return model.config.model_type in _MAPS


def weight_map(model: Any, given: Mapping[str, str | Iterable[str]] | None = None) -> WeightMap:
    """Return which weight of a Transformers model is which piece.

    Args:
        given: Weight -> its piece or pieces, of a model type that was registered by the program.

    Raises:
        ConfigurationError: If the type is not known, or the model has weights that no piece takes.
    """
    kind = model.config.model_type
    if given is None and not is_known(model):
        raise ConfigurationError(
            f"The weights of a model of type {kind!r} cannot be carried to Megatron: known are {', '.join(_MAPS)}. Write "
            "megatron_lm_default_args['weight_map'] in the parser that you registered for it, or build the model under "
            "init_empty_weights() to begin with weights that Megatron draws."
        )
    if given is not None:
        known = {name: Weight(name, (ours,) if isinstance(ours, str) else tuple(ours)) for name, ours in given.items()}
    else:
        known = {weight.theirs: weight for weight in _MAPS[kind](model.config)}
    state = model.state_dict(keep_vars=True)
    owners = {id(state[name]): name for name in reversed(known) if name in state}
    aliases = {
        name: owners[id(tensor)]
        for name, tensor in state.items()
        if id(tensor) in owners and owners[id(tensor)] != name
    }
    left = [name for name in state if name not in known and name not in aliases]
    if left:
        raise ConfigurationError(
            f"{type(model).__name__} has weights that Megatron's model of type {kind!r} has not: "
            f"{', '.join(left[:5])}{' ...' if len(left) > 5 else ''}. Pass the Transformers model itself, without adapters or "
            "layers of your own, or give custom_model_provider_function."
        )
    carried = {name: weight for name, weight in known.items() if name in state and name not in aliases}
    pieces = {piece: weight for weight in carried.values() for piece in weight.ours}
    for alias, owner in aliases.items():
        # The last stage of a pipeline has its own copy of embeddings that are also its output layer.
        for piece in known[alias].ours if alias in known else ():
            pieces.setdefault(piece, replace(known[alias], theirs=owner))
    return WeightMap(carried, pieces, aliases, tuple(state))
