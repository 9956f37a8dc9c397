"""Layers that two ranks share compute what one computes: exchanges, draws, padded vocabularies and split sequences."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.training import assert_near, fresh_accelerator, group_once, run_checks

from accelerate import PartialState
from accelerate._base.imports import is_package_available
from accelerate.strategies.megatron.strategy import MegatronStrategy
from accelerate.strategies.megatron.train_steps import whole_sequences
from accelerate.utils import MegatronLMPlugin

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not is_package_available("megatron.core"), reason="needs megatron-core"),
]

# Odd numbers, so that neither the words nor the positions of a sequence can be shared out evenly.
WORDS, ROWS, LENGTH = 21, 2, 7
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
POSITIONS = {"vocab_size": WORDS, "max_position_embeddings": 16}
IDS = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 5 % WORDS
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"tp_degree": 1},
    "split layers": {"tp_degree": 2, "sequence_parallelism": False},
    "split sequences": {"tp_degree": 2, "sequence_parallelism": True},
}
Results = dict[str, Any]


def import_quietly(module: str = "accelerate.strategies.megatron.cpu_layers") -> Any:
    with warnings.catch_warnings():
        # Megatron-core warns of every package for accelerators that is not there.
        warnings.simplefilter("ignore")
        return import_module(module)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Import once what the processes of all groups inherit."""
    import_quietly("accelerate.strategies.megatron.carried")


def draw(kind: str, config: str, **sizes: Any) -> Any:
    """Return a model with weights that are large enough for attention to choose."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(std=0.3)
    return model.eval()


def gpt2(dropout: float = 0.0) -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 16}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)
    return draw("GPT2LMHeadModel", "GPT2Config", **sizes, **drops, bos_token_id=1, eos_token_id=2)


def llama() -> Any:
    return draw("LlamaForCausalLM", "LlamaConfig", **SIZES, **POSITIONS, num_key_value_heads=2)


def bert(dropout: float = 0.0) -> Any:
    drops = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), dropout)
    return draw("MegatronBertForPreTraining", "MegatronBertConfig", **SIZES, **POSITIONS, **drops)


def t5(dropout: float = 0.0) -> Any:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
    return draw("T5ForConditionalGeneration", "T5Config", **sizes, dropout_rate=dropout, decoder_start_token_id=0)


MAKERS: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}


def batch_of(name: str) -> dict[str, torch.Tensor]:
    """Return sequences of two lengths, those of a T5's decoder of another odd one."""
    mask = torch.ones_like(IDS)
    mask[1, -2:] = 0
    labels = torch.where(mask.bool() & (IDS % 3 > 0), IDS, -100)
    more = {"bert": {"next_sentence_label": torch.tensor([0, 1])}}.get(name, {})
    return {
        "input_ids": IDS,
        "attention_mask": mask,
        "labels": labels[:, :5].clone() if name == "t5" else labels,
        **more,
    }


def prepare(model: Any, **options: Any) -> Any:
    # Megatron-core 0.16 warns of calls of its own.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="megatron")
    return fresh_accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options)).prepare(model)


def logits_of(output: Any) -> torch.Tensor:
    return next(output[name] for name in ("logits", "prediction_logits") if output.get(name) is not None).detach()


# --- exchanges --------------------------------------------------------------------------------------------------------


def ours(dim: int) -> torch.Tensor:
    """Return this rank's part: ten and more on the first, twenty and more on the second."""
    numbers = torch.arange(6.0).reshape(2, 3) + 10 * (1 + dist.get_rank())
    return numbers if dim == 0 else numbers.t().contiguous()


def pull(output: torch.Tensor, source: torch.Tensor) -> list[Any]:
    """Return the gradient of a sum whose weights count up, and twice as fast on the second rank."""
    weights = torch.arange(1.0, output.numel() + 1).view_as(output) * (1 + dist.get_rank())
    (gradient,) = torch.autograd.grad((output * weights).sum(), source)
    found: list[Any] = gradient.tolist()
    return found


def exchanges() -> dict[int, Results]:
    cpu_layers = import_quietly()
    group, found = dist.group.WORLD, {}
    for dim in (0, 1):
        part = ours(dim).requires_grad_()
        joined, summing = (cpu_layers.gather(part, group, dim=dim, sums=sums) for sums in (False, True))
        source = torch.cat([ours(dim), ours(dim) + 100], dim=dim).requires_grad_()
        own, total = (cpu_layers.scatter(source, group, dim=dim, sums=sums) for sums in (False, True))
        found[dim] = {
            "parts": [cpu_layers.gather_parts(part.detach(), group, dim).tolist(), joined.tolist(), summing.tolist()],
            "gather": pull(joined, part),
            "gather sums": pull(summing, part),
            "own_part": [cpu_layers.own_part(source.detach(), group, dim).tolist(), own.tolist()],
            "sum_to_parts": [cpu_layers.sum_to_parts(source.detach(), group, dim).tolist(), total.tolist()],
            "scatter": pull(own, source),
            "scatter sums": pull(total, source),
            "source": source.tolist(),
        }
    return found


def draws() -> dict[str, Any]:
    draws_of_rank = import_quietly().draws_of_rank
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        for _ in range(2):
            with draws_of_rank(dist.group.WORLD):
                inside = torch.rand(3).tolist()
            found.append((inside, torch.rand(3).tolist()))
    return {"first": found[:2], "again": found[2:]}


def basics() -> Results:
    PartialState(cpu=True)
    return run_checks(exchanges, draws)


def by_rows(value: list[Any], dim: int) -> torch.Tensor:
    """Return numbers as they are along the first dimension."""
    return torch.tensor(value) if dim == 0 else torch.tensor(value).t()


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_come_together_and_gradients_go_back(dim: int) -> None:
    ranks = [found["exchanges"][dim] for found in group_once(basics, 2)]
    parts = [torch.arange(6.0).reshape(2, 3) + 10 * (1 + rank) for rank in range(2)]
    weights = torch.arange(1.0, 13).reshape(4, 3) if dim == 0 else torch.arange(1.0, 13).reshape(3, 4).t()
    for rank, found in enumerate(ranks):
        mine = slice(2 * rank, 2 * rank + 2)
        for whole in found["parts"]:
            assert torch.equal(by_rows(whole, dim), torch.cat(parts))
        assert torch.equal(by_rows(found["gather"], dim), (weights * (1 + rank))[mine])
        assert torch.equal(by_rows(found["gather sums"], dim), (weights * 3)[mine])


@pytest.mark.parametrize("dim", [0, 1])
def test_a_whole_is_shared_out_and_gradients_come_together(dim: int) -> None:
    ranks = [found["exchanges"][dim] for found in group_once(basics, 2)]
    sources = [by_rows(found["source"], dim) for found in ranks]
    weights = torch.arange(1.0, 7).reshape(2, 3) if dim == 0 else torch.arange(1.0, 7).reshape(3, 2).t()
    for rank, found in enumerate(ranks):
        mine = slice(2 * rank, 2 * rank + 2)
        for own in found["own_part"]:
            assert torch.equal(by_rows(own, dim), sources[rank][mine])
        for total in found["sum_to_parts"]:
            assert torch.equal(by_rows(total, dim), (sources[0] + sources[1])[mine])
        for name in ("scatter", "scatter sums"):
            assert torch.equal(by_rows(found[name], dim), torch.cat([weights, weights * 2]))


def test_ranks_draw_numbers_of_their_own_and_go_on_alike() -> None:
    first, second = (found["draws"] for found in group_once(basics, 2))
    for one, other in zip(first["first"], second["first"], strict=True):
        assert one[0] != other[0]
        assert one[1] == other[1]
    assert first["first"][0] != first["first"][1]
    assert (first["first"], second["first"]) == (first["again"], second["again"])


# --- models -----------------------------------------------------------------------------------------------------------


def outcomes(name: str) -> dict[str, Results]:
    """Return what a model gives in each way of splitting it, and what Transformers gives."""
    model, batch = MAKERS[name](), batch_of(name)
    with torch.no_grad():
        expected = model(**batch)
    found: dict[str, Results] = {"transformers": {"loss": expected.loss, "logits": logits_of(expected)}}
    for way, options in WAYS.items():
        engine = prepare(MAKERS[name](), **options)
        evaluated = engine.eval()(**batch)
        trained = engine.train()(**batch)
        trained.loss.backward()
        weights = engine.carried.weights
        grown = [weights.whole(layout, parameter.grad) for layout, parameter in weights if parameter.grad is not None]
        found[way] = {
            "logits": logits_of(evaluated),
            "losses": [evaluated.loss, trained.loss.detach()],
            "gradients": {piece: gradient for pieces in grown for piece, gradient in pieces.items()},
            "padding": padding_of(engine.module),
        }
    return found


def padding_of(module: torch.nn.Module) -> list[Any]:
    """Return the shapes of vocabularies on this rank, with weights and gradients of the last word."""
    named = {id(tensor): (name, tensor) for name, tensor in module.named_parameters()}.values()
    words = [tensor for name, tensor in named if "word_embeddings" in name or "output_layer" in name]
    assert words
    return [
        (tensor.shape[0], tensor[-1].detach().abs().sum().item(), tensor.grad[-1].abs().sum().item())
        for tensor in words
    ]


def models() -> dict[str, Any]:
    return {name: outcomes(name) for name in MAKERS}


each_model = pytest.mark.parametrize("name", MAKERS)
split = pytest.mark.parametrize("way", ["split layers", "split sequences"])


@each_model
@pytest.mark.parametrize("way", WAYS)
def test_words_have_the_scores_that_one_rank_gives_them(name: str, way: str) -> None:
    for found in group_once(models, 2):
        expected = found[name]["transformers"]
        logits = found[name][way]["logits"]
        assert logits.shape == (ROWS, 5 if name == "t5" else LENGTH, WORDS)
        seen = batch_of(name)["attention_mask"].bool() if name != "t5" else torch.ones(ROWS, 5, dtype=torch.bool)
        assert_near("logits", logits[seen], expected["logits"][seen], 1e-4)
        for loss in found[name][way]["losses"]:
            assert_near("loss", loss, expected["loss"], 1e-5)


@each_model
@split
def test_gradients_are_those_of_one_rank(name: str, way: str) -> None:
    for found in group_once(models, 2):
        expected = found[name]["whole"]["gradients"]
        assert found[name][way]["gradients"].keys() == expected.keys()
        for piece, gradient in expected.items():
            assert_near(piece, found[name][way]["gradients"][piece], gradient, 1e-4)


@each_model
@split
def test_words_that_pad_a_vocabulary_learn_nothing(name: str, way: str) -> None:
    first, second = (found[name][way]["padding"] for found in group_once(models, 2))
    assert len(first) == len(second)
    for (rows, _, _), (padded_rows, weight, gradient) in zip(first, second, strict=True):
        assert rows == padded_rows == (WORDS + 1) // 2
        assert (weight, gradient) == (0.0, 0.0)
    assert any(gradient > 0 for _, _, gradient in first)


def glm() -> Any:
    experts = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2}
    rest = {"num_key_value_heads": 2, "head_dim": 8, "first_k_dense_replace": 1, "use_qk_norm": True}
    return draw("Glm4MoeForCausalLM", "Glm4MoeConfig", **SIZES, **POSITIONS, **experts, **rest)


def carried(maker: Callable[[], Any], **options: Any) -> Results:
    """Return how far logits are from those of Transformers, and the weights that do not come back as they were."""
    model = maker()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine = prepare(model, tp_degree=2, sequence_parallelism=True, **options).eval()
    back = engine.carried.full_state_dict(keep=True)
    changed = [name for name, tensor in state.items() if not torch.equal(back[name], tensor)]
    return {"changed": changed, "apart": (engine(input_ids=IDS).logits - logits).abs().max().item()}


def experts(ranks: int) -> Results:
    """Run experts on the CPU: their router makes buffers on the current GPU, and asks for Transformer Engine."""
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)
    torch.cuda.current_device = lambda: torch.device("cpu")
    MegatronStrategy.check_experts = lambda *_: None  # type: ignore[method-assign]
    import_quietly("megatron.core.transformer.moe.moe_utils").te_general_gemm = None
    return carried(glm, expert_tensor_parallel_size=ranks)


OWN_LAYOUTS = {"shared experts": (experts, 2, 2), "whole experts": (experts, 2, 1)}


@pytest.mark.parametrize("run", OWN_LAYOUTS)
def test_a_model_of_its_own_layout_is_carried_and_comes_back(run: str) -> None:
    for found in group_once(*OWN_LAYOUTS[run]):
        assert found["changed"] == []
        assert found["apart"] < 1e-4


# --- parts of sequences ---


def parts_of_sequences() -> dict[str, Any]:
    """What is shared out from the front and the back comes together in its order."""
    PartialState(cpu=True)
    whole, group = torch.arange(16).reshape(2, 8), dist.group.WORLD
    part = import_quietly("megatron.core.utils").get_batch_on_this_cp_rank({"tokens": whole}, group)["tokens"]
    return {"part": part.tolist(), "whole": torch.equal(whole_sequences(part, group), whole)}


def test_parts_of_sequences_come_together_in_their_order() -> None:
    found = group_once(parts_of_sequences, 2)
    assert [entry["part"][0] for entry in found] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert all(entry["whole"] for entry in found)


# --- dropout ----------------------------------------------------------------------------------------------------------

AGAIN: dict[str, dict[str, Any]] = {
    "once": {},
    "once more": {},
    "layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "attention": {"recompute_granularity": "selective"},
}


def dropped(name: str, **options: Any) -> Results:
    """Train once with dropout; return what was dropped, states, and what attention makes of the same inputs."""
    engine = prepare(MAKERS[name](dropout=0.3), **options).train()
    module, drops, states, drop = engine.module, [], [], torch.nn.functional.dropout

    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = drop(*args, **kwargs)
        drops.append(result.detach() == 0)
        return result

    stack = getattr(module, "decoder", None) or module.encoder
    stack.register_forward_hook(lambda *args: states.append(args[-1].detach().clone()))
    given = [torch.randn(4, 1, 2, 4, generator=torch.Generator().manual_seed(at)) for at in range(3)]
    torch.manual_seed(9)
    with patch.object(torch.nn.functional, "dropout", noting):
        loss = engine(**batch_of(name)).loss
    loss.backward()
    grown = torch.stack([parameter.grad.norm() for parameter in module.parameters()])
    attended = stack.layers[0].self_attention.core_attention(*given, None).detach()
    return {"loss": loss.detach(), "gradients": grown, "states": states[0], "drops": drops, "attended": attended}


def dropouts() -> dict[str, Any]:
    return {
        f"{name}, {way}": {again: dropped(name, **WAYS[way], **options) for again, options in AGAIN.items()}
        for name in ("gpt2", "bert", "t5")
        for way in ("split layers", "split sequences")
    }


each_dropped = pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])


@each_dropped
@split
@pytest.mark.parametrize("again", list(AGAIN)[1:])
def test_draws_repeat_after_the_same_seed_and_where_layers_compute_again(name: str, way: str, again: str) -> None:
    for found in group_once(dropouts, 2):
        first, second = (found[f"{name}, {way}"][turn] for turn in ("once", again))
        assert torch.cat([first["loss"][None], first["gradients"]]).isfinite().all()
        for label in ("loss", "gradients", "states"):
            assert torch.equal(first[label], second[label]), label


@each_dropped
@split
def test_ranks_drop_the_same_of_the_same_states_and_others_of_other_positions(name: str, way: str) -> None:
    first, second = (found[f"{name}, {way}"]["once"] for found in group_once(dropouts, 2))
    is_same = way == "split layers"
    # The embeddings and two for each layer, or three of a layer that looks at an encoder.
    assert len(first["drops"]) == len(second["drops"]) == {"gpt2": 5, "bert": 5, "t5": 12}[name]
    for one, other in zip(first["drops"], second["drops"], strict=True):
        assert one.any()
        assert torch.equal(one, other) == is_same
    assert torch.equal(first["states"], second["states"]) == is_same
    assert torch.equal(first["loss"], second["loss"])


@each_dropped
@split
def test_ranks_drop_what_other_heads_look_at(name: str, way: str) -> None:
    first, second = (found[f"{name}, {way}"]["once"]["attended"] for found in group_once(dropouts, 2))
    assert not torch.equal(first, second)
