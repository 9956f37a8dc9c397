"""The layers that torch computes on the CPU give what their formulas say, and the same when they compute again."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.megatron import draw
from tests.support.training import assert_near, fresh_accelerator

from accelerate._base.imports import is_package_available
from accelerate.strategies.megatron.options import core
from accelerate.utils import MegatronLMPlugin

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.skipif(not is_package_available("megatron.core"), reason="needs megatron-core"),
    pytest.mark.usefixtures("alone"),
]

WORDS, LENGTH, HEADS, HEAD = 21, 6, 4, 4
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": HEADS}
POSITIONS = {"vocab_size": WORDS, "max_position_embeddings": 16}


def gpt2(dropout: float = 0.0) -> Any:
    sizes = {"n_embd": 16, "n_layer": 3, "n_head": HEADS, "vocab_size": WORDS, "n_positions": 16}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    return draw("GPT2LMHeadModel", "GPT2Config", **sizes, **drops, bos_token_id=1, eos_token_id=2)


def llama(dropout: float = 0.0, **changes: Any) -> Any:
    sizes = {**SIZES, **POSITIONS, "num_key_value_heads": 2, "attention_dropout": dropout}
    return draw("LlamaForCausalLM", "LlamaConfig", **{**sizes, **changes})


def bert(dropout: float = 0.0) -> Any:
    drops = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), dropout)
    return draw("MegatronBertForPreTraining", "MegatronBertConfig", **SIZES, **POSITIONS, **drops)


def t5(dropout: float = 0.0) -> Any:
    sizes = {"d_model": 16, "d_kv": HEAD, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": HEADS}
    rest = {"vocab_size": WORDS, "decoder_start_token_id": 0, "dropout_rate": dropout}
    return draw("T5ForConditionalGeneration", "T5Config", **sizes, **rest)


MAKERS: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}
IDS = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 5 % WORDS


def prepare(model: Any, **options: Any) -> Any:
    return fresh_accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options)).prepare(model)


# --- attention --------------------------------------------------------------------------------------------------------


def inputs(heads: int = HEADS, groups: int = HEADS, keys: int = LENGTH) -> list[torch.Tensor]:
    """Return queries, keys and values of two sequences, with the sequence first."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((LENGTH, heads), (keys, groups), (keys, groups))
    return [torch.randn(length, 2, count, HEAD, generator=generator).requires_grad_() for length, count in shapes]


def formula(
    given: list[torch.Tensor], scale: float, hidden: torch.Tensor, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Attend as it is written down: scores, a softmax of those that are seen, a mean of values."""
    query, key, value = given
    key, value = (tensor.repeat_interleave(query.shape[2] // key.shape[2], dim=2) for tensor in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale + bias
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def later(keys: int = LENGTH) -> torch.Tensor:
    return torch.ones(LENGTH, keys, dtype=torch.bool).triu(1)


def padded() -> torch.Tensor:
    """Return a mask that hides the last two keys of the second sequence."""
    hidden = torch.zeros(2, 1, 1, LENGTH, dtype=torch.bool)
    hidden[1, ..., -2:] = True
    return hidden


def gradients(output: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(
        torch.autograd.grad((output * torch.arange(1.0, output.numel() + 1).view_as(output).cos()).sum(), given)
    )


def assert_attends(
    attention: Any, given: list[torch.Tensor], expected: torch.Tensor, *args: Any, **options: Any
) -> None:
    found = attention(*given, *args, **options)
    assert found.shape == expected.shape
    assert_near("outputs", found, expected, 1e-5)
    for name, one, other in zip("qkv", gradients(found, given), gradients(expected, given), strict=True):
        assert_near(f"gradients of {name}", one, other, 1e-5)


def attention_of(model: Any, stack: str = "decoder", kind: str = "self_attention", **options: Any) -> Any:
    layer = getattr(prepare(model, **options).module, stack).layers[0]
    return getattr(layer, kind).core_attention


def bias() -> torch.Tensor:
    return torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))


def test_attention_of_a_decoder_looks_back_alone() -> None:
    given = inputs()
    assert_attends(attention_of(gpt2()), given, formula(given, 1 / math.sqrt(HEAD), later()), None)


def test_a_mask_that_is_given_says_all_that_is_hidden() -> None:
    given, hidden = inputs(), later() | padded()
    assert_attends(attention_of(gpt2()), given, formula(given, 1 / math.sqrt(HEAD), hidden), hidden)
    assert_attends(attention_of(bert(), "encoder"), given, formula(given, 1 / math.sqrt(HEAD), padded()), padded())


def test_grouped_queries_share_keys_and_values() -> None:
    given = inputs(groups=2)
    attention, scale = attention_of(llama()), 1 / math.sqrt(HEAD)
    assert_attends(attention, given, formula(given, scale, later()), None)
    assert_attends(attention, given, formula(given, scale, later() | padded()), later() | padded())


def test_a_bias_is_added_to_scores() -> None:
    """T5 does not scale its scores; its encoder sees all, also where no mask says so."""
    given, no_mask = inputs(), torch.zeros(1, dtype=torch.bool)
    attention = attention_of(t5(), "encoder")
    assert_attends(attention, given, formula(given, 1.0, no_mask, bias()), None, attention_bias=bias())
    assert_attends(attention, given, formula(given, 1.0, padded(), bias()), padded(), attention_bias=bias())


def test_a_bias_without_a_mask_hides_what_is_later() -> None:
    given, causal = inputs(), core("transformer.enums").AttnMaskType.causal
    expected = formula(given, 1.0, later(), bias())
    assert_attends(attention_of(t5(), "decoder"), given, expected, None, attn_mask_type=causal, attention_bias=bias())


def test_a_decoder_looks_at_another_sequence() -> None:
    given = inputs(keys=LENGTH + 3)
    hidden = torch.zeros(2, 1, LENGTH, LENGTH + 3, dtype=torch.bool)
    hidden[0, ..., :4] = True
    assert_attends(attention_of(t5(), "decoder", "cross_attention"), given, formula(given, 1.0, hidden), hidden)


@pytest.mark.parametrize("added", [None, bias()], ids=["mask", "mask and bias"])
@pytest.mark.parametrize("dtype", [torch.float, torch.bfloat16])
def test_a_row_that_sees_nothing_stays_finite(added: torch.Tensor | None, dtype: torch.dtype) -> None:
    given, hidden = (
        [tensor.detach().to(dtype).requires_grad_() for tensor in inputs()],
        torch.zeros(2, 1, LENGTH, LENGTH),
    )
    hidden[1, :, :2] = 1  # as in a sequence that is padded on the left
    found = attention_of(gpt2())(*given, hidden.bool(), attention_bias=added)
    assert all(tensor.isfinite().all() for tensor in (found, *gradients(found, given)))


def test_attention_drops_in_training_alone() -> None:
    given, attention = inputs(), attention_of(gpt2(dropout=0.5))
    expected = formula(given, 1 / math.sqrt(HEAD), later())
    assert not torch.allclose(attention.train()(*given, None), expected)
    assert_attends(attention.eval(), given, expected, None)


# --- rotary positions -------------------------------------------------------------------------------------------------

SCALED = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "usual": {"rope_type": "default", "rope_theta": 10000.0},
    "other base": {"rope_type": "default", "rope_theta": 50.0},
    "llama3": {**SCALED, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_positions_are_rotated_as_transformers_does(rope: dict[str, Any]) -> None:
    model = llama(rope_parameters=rope, hidden_size=64, max_position_embeddings=40).eval()
    ids = torch.arange(80).reshape(2, 40) * 7 % WORDS
    with torch.no_grad():
        cosines, sines = model.model.rotary_emb(torch.ones(1), torch.arange(40)[None])
        expected = model(input_ids=ids).logits
    engine = prepare(model)
    angles = engine.module.rotary_pos_emb(40)
    assert angles.shape == (40, 1, 1, 16)
    assert_near("cosines", angles.cos()[:, 0, 0], cosines[0], 1e-5)
    assert_near("sines", angles.sin()[:, 0, 0], sines[0], 1e-5)
    assert_near("logits", engine.eval()(input_ids=ids).logits, expected, 1e-4)


def test_interleaved_positions_repeat_each_angle() -> None:
    rotary = prepare(llama()).module.rotary_pos_emb
    rotary.rotary_interleaved = True
    angles = rotary.get_freqs_non_repeated(5, 0)
    assert torch.equal(rotary.get_emb(5)[:, 0, 0], angles.repeat_interleave(2, dim=1))


# --- computing again --------------------------------------------------------------------------------------------------

AGAIN: dict[str, dict[str, Any]] = {
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform by two": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective"},
}
LABELS = {
    "bert": {"next_sentence_label": torch.tensor([0, 1])},
    "t5": {"decoder_attention_mask": torch.ones(2, LENGTH)},
}


def train_once(name: str, dropout: float, **options: Any) -> dict[str, torch.Tensor]:
    """Return the logits, the loss and the gradients of one batch, with sequences of two lengths."""
    engine = prepare(MAKERS[name](dropout=dropout), return_logits=True, **options).train()
    mask = torch.ones_like(IDS)
    mask[1, -2:] = 0
    torch.manual_seed(3)
    output = engine(input_ids=IDS, labels=IDS, attention_mask=mask, **LABELS.get(name, {}))
    output.loss.backward()
    logits = output.prediction_logits if name == "bert" else output.logits
    grown = {key: parameter.grad for key, parameter in engine.module.named_parameters()}
    return {"loss": output.loss.detach(), "logits": logits.detach(), **grown}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MAKERS)
def test_what_is_computed_again_is_the_same_to_the_bit(name: str, dropout: float) -> None:
    expected = train_once(name, dropout)
    for way, options in AGAIN.items():
        found = train_once(name, dropout, **options)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert tensor is not None, key
            assert torch.equal(found[key], tensor), f"{way}: {key}"


def test_dropout_changes_what_is_trained() -> None:
    """So that the test above compares numbers that draws have a part in."""
    assert not torch.equal(train_once("gpt2", 0.3)["logits"], train_once("gpt2", 0.0)["logits"])


@pytest.mark.parametrize(
    ("way", "layers", "attentions"),
    [
        (None, [1, 1, 1], 3),
        ("uniform", [2, 2, 2], 6),
        ("uniform by two", [2, 2, 2], 6),
        ("block", [2, 2, 1], 5),
        ("selective", [1, 1, 1], 6),
    ],
)
def test_the_layers_that_are_named_are_computed_twice(
    way: str | None, layers: list[int], attentions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = prepare(gpt2(), **AGAIN.get(way or "", {})).train()
    counted: Counter[Any] = Counter()
    for index, layer in enumerate(engine.module.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: counted.update([index]))
    attend = torch.nn.functional.scaled_dot_product_attention

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        counted.update(["attention"])
        return attend(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    engine(input_ids=IDS, labels=IDS).loss.backward()
    assert [counted[index] for index in range(3)] == layers
    assert counted["attention"] == attentions
