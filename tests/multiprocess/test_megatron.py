"""Models that Megatron trains give the losses, the weights and the gradients' norms of the same ones without it."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.megatron import WORDS, Case, Run, case, make_model, make_rows, prepare, train
from tests.support.processes import run_group
from tests.support.training import assert_near, fresh_accelerator, group_once

from accelerate import PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import MegatronLMPlugin

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.multiprocess

KINDS = ("gpt2", "llama", "bert", "bert words", "bert classes", "t5")
PLAIN = {kind: Case(kind) for kind in KINDS}
SPLIT = {"tp_degree": 2}
SEQUENCES = {"tp_degree": 2, "sequence_parallelism": True}
CASES: dict[str, Case] = {
    **{f"{kind}, 2 replicas": case(kind) for kind in KINDS},
    **{f"{kind}, split layers": case(kind, **SPLIT) for kind in KINDS},
    **{f"{kind}, split layers and sequences": case(kind, **SEQUENCES) for kind in KINDS},
    "gpt2, 2 parts of a batch": case("gpt2", num_micro_batches=2),
    "gpt2, 2 parts of a batch, split sequences": case("gpt2", num_micro_batches=2, **SEQUENCES),
    "llama, 2 batches a step": replace(case("llama"), accumulation=2),
    "llama, 2 batches a step, split sequences": replace(case("llama", **SEQUENCES), accumulation=2),
    "gpt2, mean of means": case("gpt2", calculate_per_token_loss=False),
    "gpt2, recomputes layers": case("gpt2", recompute_granularity="full", **SPLIT),
    "llama, recomputes blocks": case(
        "llama", recompute_granularity="full", recompute_method="block", recompute_num_layers=1, **SEQUENCES
    ),
    "gpt2, recomputes attention": case("gpt2", recompute_activations=True, **SEQUENCES),
    "gpt2, the loop clips": replace(case("gpt2", **SPLIT), clip=1.0),
    "llama, the loop clips": replace(case("llama", **SEQUENCES), clip=1.0),
}
TOLERANCE = 2e-4


def summary(run: Run) -> dict[str, Any]:
    losses = train(run)
    return {"losses": losses, "weights": run.weights(), "norms": run.norms}


def train_all() -> dict[str, Any]:
    """Train every case in a group of two, and the same models without Megatron."""
    return {name: summary(prepare(entry)) for name, entry in {**PLAIN, **CASES}.items()}


def trained(name: str, rank: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = group_once(train_all, 2)[rank][name]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_model_learns_as_without_megatron(name: str) -> None:
    expected = trained(CASES[name].kind)["losses"]
    for rank in range(2):
        found = trained(name, rank)["losses"]
        assert_near(name, torch.tensor(found), torch.tensor(expected), TOLERANCE)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("name", CASES)
def test_the_weights_come_back_under_their_names(name: str) -> None:
    kind = CASES[name].kind
    expected = trained(kind)["weights"]
    before = make_model(kind).state_dict()
    for rank in range(2):
        found = trained(name, rank)["weights"]
        assert list(found) == list(before)
        for key, value in found.items():
            assert value.shape == before[key].shape
            # Adam makes much of gradients that are nearly zero.
            assert torch.allclose(value, expected[key], rtol=0.05, atol=2e-2), key


@pytest.mark.parametrize("name", ["gpt2, the loop clips", "llama, the loop clips"])
def test_the_norm_is_that_of_the_whole_model(name: str) -> None:
    expected = trained(CASES[name].kind)["norms"]
    for rank in range(2):
        assert_near(name, torch.tensor(trained(name, rank)["norms"]), torch.tensor(expected), 1e-3)


# --- other questions, in one group ------------------------------------------------------------------------------------


def untouched_weights() -> dict[str, Any]:
    """Weights that went in come out bit for bit, of every kind and with either degree."""
    found = {}
    for kind in KINDS:
        for options in ({}, SPLIT):
            run = prepare(case(kind, **options))
            expected = make_model(kind).state_dict()
            weights = run.weights()
            found[f"{kind} {options}"] = all(torch.equal(weights[name], value) for name, value in expected.items())
    return found


def logits_of_all_words() -> dict[str, Any]:
    """In evaluation a model returns the logits of the Transformers model: of the true words alone."""
    found = {}
    for kind in ("gpt2", "llama", "bert words", "t5"):
        batch = {name: torch.stack([row[name] for row in make_rows(kind, 4)]) for name in make_rows(kind, 1)[0]}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, -4:] = 0
        with torch.no_grad():
            expected = make_model(kind).eval()(**batch)
        for name, options in {"layers": SPLIT, "sequences": SEQUENCES}.items():
            model = prepare(case(kind, **options)).model.eval()
            outputs = model(**batch)
            without = model(**{key: value for key, value in batch.items() if key != "labels" or kind == "t5"})
            close = torch.allclose(outputs.logits, expected.logits, atol=1e-4)
            found[f"{kind} {name}"] = {
                "close": close and torch.allclose(without.logits, expected.logits, atol=1e-4),
                "words": outputs.logits.shape[-1],
                "loss": abs(float(outputs.loss) - float(expected.loss)),
            }
    return found


def dropout() -> dict[str, Any]:
    """Ranks that hold the same states drop the same of them, and a seed gives the same losses again."""
    first = train(prepare(replace(case("gpt2", steps=3, **SPLIT), dropout=0.2)))
    again = train(prepare(replace(case("gpt2", steps=3, **SPLIT), dropout=0.2)))
    sequences = train(prepare(replace(case("gpt2", steps=3, **SEQUENCES), dropout=0.2)))
    run = prepare(replace(case("gpt2", steps=3, **SPLIT), dropout=0.2))
    train(run)
    norms = [parameter for name, parameter in run.model.named_parameters() if "layernorm" in name]
    return {
        "first": first,
        "again": again,
        "sequences": sequences,
        "norm": [entry.detach().sum().item() for entry in norms],
    }


def main_process() -> dict[str, Any]:
    """The last rank prints, logs and saves."""
    run = prepare(case("gpt2", **SPLIT))
    state = PartialState()
    facts = {
        "main": run.accelerator.is_main_process,
        "local": run.accelerator.is_local_main_process,
        "state": state.is_main_process,
        "type": str(run.accelerator.distributed_type),
    }
    prepare(Case("gpt2"))
    return {**facts, "without": PartialState().is_main_process}


def weights_of_the_first_rank() -> dict[str, Any]:
    """Ranks that build different models begin with that of the first, also where Megatron draws the weights."""
    found = {}
    for name, options in {"replicas": {}, "layers": SPLIT}.items():
        for place in ("cpu", "meta"):
            accelerator = fresh_accelerator(megatron_lm_plugin=MegatronLMPlugin(**options))
            with torch.device(place):
                model = make_model("gpt2")
            torch.manual_seed(PartialState().process_index)
            if place == "cpu":
                for parameter in model.parameters():
                    parameter.data.normal_()
            weights = accelerator.get_state_dict(accelerator.prepare(model))
            found[f"{name} {place}"] = sum(value.double().sum().item() for value in weights.values())
    return found


def what_the_main_process_does(folder: str) -> dict[str, Any]:
    """It writes with `save` and records with trackers, in a loop that asks for it; and all is let go at the end."""
    accelerator = fresh_accelerator(megatron_lm_plugin=MegatronLMPlugin(**SPLIT), log_with=Lines(folder))
    model = make_model("gpt2")
    gone = weakref.ref(model)
    engine, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held = weakref.ref(engine)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    if accelerator.is_main_process:
        accelerator.save({"a": torch.ones(1)}, f"{folder}/saved.bin")
    accelerator.end_training()
    engine, optimizer = accelerator.free_memory(engine, optimizer)
    del model
    gc.collect()
    return {"freed": (engine, optimizer) == (None, None), "gone": gone() is None and held() is None}


class Lines(GeneralTracker):
    """Write what is logged, with the rank that does."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    @property
    def tracker(self) -> None:
        return None

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do without."""

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with open(f"{self.folder}/lines", "a") as file:
            file.write(f"{PartialState().process_index} {values}\n")


def half_precision() -> list[float]:
    return train(prepare(replace(case("llama", steps=5, **SPLIT), precision="bf16")))


def several_questions() -> dict[str, Any]:
    questions = (
        untouched_weights,
        logits_of_all_words,
        dropout,
        main_process,
        half_precision,
        weights_of_the_first_rank,
    )
    return {question.__name__: question() for question in questions}


def answer(question: Any, rank: int = 1) -> Any:
    return group_once(several_questions, 2)[rank][question.__name__]


def test_weights_that_were_not_trained_come_back_bit_for_bit() -> None:
    assert answer(untouched_weights) == dict.fromkeys(answer(untouched_weights), True)
    assert answer(untouched_weights, 0) == answer(untouched_weights)


def test_logits_are_those_of_the_true_words() -> None:
    for rank in range(2):
        for name, found in answer(logits_of_all_words, rank).items():
            assert found["close"], name
            assert found["words"] == WORDS
            assert found["loss"] < 1e-4, name


def test_ranks_of_a_layer_drop_the_same_states() -> None:
    found = [answer(dropout, rank) for rank in range(2)]
    assert found[0]["first"] == found[0]["again"]
    assert found[0]["first"] == found[1]["first"]
    assert found[0]["norm"] == found[1]["norm"]
    assert found[0]["sequences"] != found[0]["first"]


def test_the_last_rank_is_the_main_one() -> None:
    expected = {"type": "DistributedType.MEGATRON_LM"}
    assert answer(main_process, 1) == {**expected, "main": True, "local": True, "state": True, "without": False}
    assert answer(main_process, 0) == {**expected, "main": False, "local": False, "state": False, "without": True}


def test_all_ranks_begin_with_the_weights_of_the_first() -> None:
    found = [answer(weights_of_the_first_rank, rank) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["replicas cpu"] == found[0]["layers cpu"]
    # Megatron draws a weight as a whole before it cuts it, but the words that pad the vocabulary as well.
    assert found[0]["replicas meta"] != found[0]["replicas cpu"]


def test_the_main_process_saves_and_records(tmp_path: Path) -> None:
    for found in run_group(what_the_main_process_does, 2, str(tmp_path)):
        assert found == {"freed": True, "gone": True}
    assert torch.load(tmp_path / "saved.bin", weights_only=True)["a"].item() == 1.0
    assert (tmp_path / "lines").read_text() == "1 {'loss': 1.0}\n"


def test_half_precision_learns_nearly_as_single_does() -> None:
    expected = trained("llama, split layers")["losses"][:5]
    assert_near("bf16", torch.tensor(answer(half_precision)), torch.tensor(expected), 5e-2)
