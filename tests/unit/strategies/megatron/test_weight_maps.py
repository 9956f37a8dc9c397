"""Each weight of a Transformers model is a piece of the model that Megatron trains, for all types that are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.training import assert_near, fresh_accelerator

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import is_package_available
from accelerate.strategies.megatron.options import core
from accelerate.strategies.megatron.strategy import MegatronStrategy
from accelerate.strategies.megatron.weight_maps import weight_map
from accelerate.utils import MegatronLMPlugin

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not is_package_available("megatron.core"), reason="needs megatron-core")

Maker = Callable[[], Any]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": 21, "max_position_embeddings": 16}
GROUPED = {**SIZES, **WORDS, "num_key_value_heads": 2}


def draw(kind: str, config: str, **sizes: Any) -> Any:
    """Return a model whose weights, also those that begin as ones and zeros, are all different."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.normal_()
    return model


def gpt2(**changes: Any) -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 21, "n_positions": 16}
    return draw("GPT2LMHeadModel", "GPT2Config", **{**sizes, "bos_token_id": 1, "eos_token_id": 2, **changes})


def llama(**changes: Any) -> Any:
    return draw("LlamaForCausalLM", "LlamaConfig", **{**GROUPED, "eos_token_id": 2, **changes})


def bert(head: str, **changes: Any) -> Any:
    return draw(f"MegatronBertFor{head}", "MegatronBertConfig", **{**SIZES, **WORDS, **changes})


def t5(**changes: Any) -> Any:
    sizes = {"d_model": 16, "d_kv": 5, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
    return draw("T5ForConditionalGeneration", "T5Config", **{**sizes, "vocab_size": 21, **changes})


def glm(**changes: Any) -> Any:
    experts = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2}
    dense = {"head_dim": 8, "num_hidden_layers": 3, "first_k_dense_replace": 1, "use_qk_norm": True}
    return draw("Glm4MoeForCausalLM", "Glm4MoeConfig", **{**GROUPED, **experts, **dense, **changes})


MODELS: dict[str, Maker] = {
    "gpt2 tied": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False, n_inner=20),
    "llama untied": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=6),
    "bert for pretraining": lambda: bert("PreTraining"),
    "bert for masked words": lambda: bert("MaskedLM"),
    "bert for classes": lambda: bert("SequenceClassification", num_labels=3),
    "bert for the next sentence": lambda: bert("NextSentencePrediction"),
    "t5 relu tied": t5,
    "t5 gated untied": lambda: t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "glm4_moe": glm,
    "glm4_moe with biases, tied": lambda: glm(attention_bias=True, use_qk_norm=False, tie_word_embeddings=True),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def prepare(model: Any, **options: Any) -> Any:
    return fresh_accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options)).prepare(model)


def held(carried: Any) -> dict[str, torch.Tensor]:
    """Return the pieces of what Megatron built."""
    return {name: piece for entry in carried.weights for name, piece in carried.weights.whole(*entry).items()}


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_bit_exact(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@each_model
def test_every_name_is_carried_once_or_stands_for_one_that_is(make: Maker) -> None:
    model = make()
    found = weight_map(model)
    state = model.state_dict(keep_vars=True)
    assert found.names == tuple(state)
    assert not found.weights.keys() & found.aliases.keys()
    assert found.weights.keys() | found.aliases.keys() == set(state)
    assert all(weight.theirs == name for name, weight in found.weights.items())
    assert all(state[name] is state[owner] for name, owner in found.aliases.items())
    assert len({id(state[name]) for name in found.weights}) == len(found.weights)


@each_model
def test_every_piece_lies_in_one_weight_alone(make: Maker) -> None:
    found = weight_map(make())
    counted = Counter(piece for weight in found.weights.values() for piece in weight.ours)
    assert set(counted.values()) == {1}
    assert found.pieces.keys() >= counted.keys()
    assert all(piece in weight.ours for piece, weight in found.pieces.items())


@each_model
def test_weights_become_pieces_and_come_back_bit_exact(make: Maker) -> None:
    model = make()
    state, found = model.state_dict(), weight_map(model)
    for name, weight in found.weights.items():
        pieces = weight.to_pieces(state[name])
        assert list(pieces) == list(weight.ours)
        assert sum(piece.numel() for piece in pieces.values()) == state[name].numel()
        back = weight.from_pieces(pieces)
        assert back.is_contiguous()
        assert torch.equal(back, state[name])
        again = weight.to_pieces(back)
        assert all(torch.equal(again[piece], tensor) for piece, tensor in pieces.items())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [name for name in MODELS if "glm" not in name])
def test_the_pieces_are_those_of_the_model_that_megatron_builds(name: str) -> None:
    model = MODELS[name]()
    expected, state = weight_map(model), copied(model.state_dict())
    carried = prepare(model).carried
    assert held(carried).keys() == {piece for weight in expected.weights.values() for piece in weight.ours}
    for theirs, weight in expected.weights.items():
        for piece, tensor in weight.to_pieces(state[theirs]).items():
            assert torch.equal(held(carried)[piece], tensor), piece
    assert_bit_exact(carried.full_state_dict(keep=True), state)
    assert carried.full_state_dict(keep=False) == {}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", [name for name in MODELS if "glm" in name])
def test_experts_are_those_that_megatron_builds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its router makes buffers on the current GPU, and asks for a name that only Transformer Engine brings."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(MegatronStrategy, "check_experts", lambda *_: None)
    monkeypatch.setattr(core("transformer.moe.moe_utils"), "te_general_gemm", None, raising=False)
    model = MODELS[name]().eval()
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    expected, state = weight_map(model), copied(model.state_dict())
    engine = prepare(model)
    assert held(engine.carried).keys() == {piece for weight in expected.weights.values() for piece in weight.ours}
    assert_bit_exact(engine.carried.full_state_dict(keep=True), state)
    assert_near(name, engine.eval()(input_ids=ids).logits, logits, 1e-4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", MODELS)
def test_an_optimizer_of_all_weights_trains_all_that_megatron_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(MegatronStrategy, "check_experts", lambda *_: None)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    engine, optimizer = fresh_accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin()).prepare(model, optimizer)
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert [key for key, parameter in engine.module.named_parameters() if id(parameter) not in known] == []


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_type_that_is_not_known_is_refused() -> None:
    model = draw("OPTForCausalLM", "OPTConfig", **SIZES, ffn_dim=8, word_embed_proj_dim=16, vocab_size=21)
    with pytest.raises(ConfigurationError) as caught:
        weight_map(model)
    assert "type 'opt' cannot be carried to Megatron: known are gpt2, llama, glm4_moe, megatron-bert, t5" in str(
        caught.value
    )
    assert "init_empty_weights()" in str(caught.value)


def test_a_type_that_a_program_registered_brings_its_own_weights() -> None:
    model = torch.nn.Linear(2, 3)
    model.config = SimpleNamespace(model_type="of my own")  # type: ignore[assignment]
    found = weight_map(model, {"weight": ("a", "b", "c"), "bias": "d", "absent": "e"})
    assert list(found.pieces) == ["a", "b", "c", "d"]
    assert found.weights["weight"].to_pieces(model.weight)["b"].equal(model.weight[1:2])


def test_layers_of_a_programs_own_are_refused() -> None:
    model = llama()
    for name in "abcdef":
        model.model.layers[0].register_parameter(name, torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigurationError) as caught:
        weight_map(model)
    names = ", ".join(f"model.layers.0.{name}" for name in "abcde")
    assert f"has weights that Megatron's model of type 'llama' has not: {names} .... Pass" in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_adapters_are_refused_when_the_model_is_prepared() -> None:
    model = gpt2()
    model.transformer.h[0].attn.adapter = torch.nn.Linear(16, 2, bias=False)
    with pytest.raises(
        ConfigurationError, match=r"has not: transformer\.h\.0\.attn\.adapter\.weight\. Pass the Transformers model"
    ):
        prepare(model)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("head", ["TokenClassification", "CausalLM"])
def test_a_model_that_lacks_weights_of_megatrons_is_refused(head: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"No weight of the model is mapped to (pooler\.dense|binary_head)\.weight"
    ):
        prepare(bert(head))


@pytest.mark.usefixtures("alone")
def test_parts_of_a_fused_weight_are_frozen_together() -> None:
    model = llama()
    attention = model.model.layers[0].self_attn
    for part in (attention.q_proj, attention.k_proj, attention.v_proj):
        part.weight.requires_grad_(False)
    trained = {name: weight.requires_grad for name, weight in prepare(model).module.named_parameters()}
    assert [name for name, trains in trained.items() if not trains] == [
        "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    model = llama()
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"but Megatron fuses both into one parameter\. Freeze both, or none"):
        prepare(model)
