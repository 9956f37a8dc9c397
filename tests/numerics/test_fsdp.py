"""Training in shards gives the losses, norms and weights of one plain process, under both versions of FSDP."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.support.sharding import (
    BY_CLASS,
    BY_SIZE,
    STEP_SAMPLES,
    Sharded,
    loss_of,
    make_text,
    make_words,
    near,
    train_words,
    train_words_plainly,
)
from tests.support.training import Outcome, assert_near, assert_same_outcome, group_once
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.multiprocess

EXACT, HALF = 1e-9, 0.05
EFFICIENT = {**BY_CLASS, "cpu_ram_efficient_loading": True}
ORIGINAL = {**BY_CLASS, "use_orig_params": True}

TWO = {
    "2, one unit": Sharded(2),
    "2, by class, accumulated, optimizer first": Sharded(2, BY_CLASS, accumulation=2, optimizer_first=True),
    "2, by size, clipped hard": Sharded(2, BY_SIZE, clip=0.05),
    "2, kept after forward": Sharded(2, {**BY_CLASS, "reshard_after_forward": False}),
    "2, activations again": Sharded(2, {**BY_CLASS, "activation_checkpointing": True}, accumulation=2),
    "2, weights on the host": Sharded(2, {**BY_CLASS, "cpu_offload": True}),
    "2, weights from the first rank": Sharded(2, EFFICIENT, on_meta=True),
    "2, a short window": Sharded(2, BY_CLASS, accumulation=2, by_window=True, clip=1e9),
    "2, bf16": Sharded(2, BY_CLASS, precision="bf16"),
    "2, fp16": Sharded(2, BY_CLASS, precision="fp16", accumulation=2),
    "1, one unit": Sharded(1),
    "1, by class, accumulated, optimizer first": Sharded(1, BY_CLASS, accumulation=2, optimizer_first=True),
    "1, by size, clipped hard": Sharded(1, BY_SIZE, clip=0.05),
    "1, parameters as they were": Sharded(1, ORIGINAL, accumulation=2),
    "1, gradients only": Sharded(1, {**ORIGINAL, "reshard_after_forward": "SHARD_GRAD_OP"}),
    "1, nothing sharded": Sharded(1, {**BY_CLASS, "reshard_after_forward": "NO_SHARD"}),
    "1, activations again": Sharded(1, {**BY_CLASS, "activation_checkpointing": True}),
    "1, weights from the first rank": Sharded(1, EFFICIENT, on_meta=True),
    "1, bf16": Sharded(1, BY_CLASS, precision="bf16"),
    "1, fp16": Sharded(1, ORIGINAL, precision="fp16"),
}
FOUR = {
    "2, by class, accumulated": Sharded(2, BY_CLASS, accumulation=2),
    "2, copies of shards": Sharded(2, BY_CLASS, accumulation=2, sizes={"dp_replicate_size": 2, "dp_shard_size": 2}),
    "2, bf16": Sharded(2, BY_CLASS, precision="bf16"),
    "1, by class, accumulated": Sharded(1, BY_CLASS, accumulation=2),
    "1, copies of shards": Sharded(
        1,
        {**BY_CLASS, "reshard_after_forward": "HYBRID_SHARD"},
        sizes={"dp_replicate_size": 2, "dp_shard_size": 2},
    ),
}
EVALUATED = {
    "one unit": Sharded(2),
    "by class": Sharded(2, BY_CLASS),
    "kept after forward": Sharded(2, {**BY_CLASS, "reshard_after_forward": False}),
    "version 1": Sharded(1, ORIGINAL),
    "arrives sharded": Sharded(2, sizes={"dp_shard_size": 2}, arrives_sharded=True),
}
WAYS = {
    "together": lambda accelerator, model, optimizer: accelerator.prepare(model, optimizer)[1],
    "alone": lambda accelerator, model, optimizer: accelerator.prepare(optimizer),
    "by its own method": lambda accelerator, model, optimizer: accelerator.prepare_optimizer(optimizer),
}


def train_all(cases: str) -> dict[str, Any]:
    warnings.filterwarnings("ignore", message="The `NO_SHARD` sharding strategy is deprecated")
    return {name: train_words(case) for name, case in (TWO if cases == "two" else FOUR).items()}


def check(name: str, case: Sharded, size: int, ranks: list[dict[str, Any]]) -> None:
    plain = train_words_plainly(case.clip, dtype=case.dtype)
    tolerance = EXACT if case.precision == "no" else HALF
    outcome, facts = ranks[0][name]
    if not case.by_window:
        for kind in ("losses", "rates"):
            left, right = (torch.tensor(getattr(side, kind), dtype=torch.float64) for side in (outcome, plain))
            assert_near(f"{name}, {kind}", left, right, tolerance)
        near(outcome.weights, plain.weights, tolerance)
    assert outcome.weights["head.weight"].equal(outcome.weights["embedding.weight"])
    assert (facts["strategy"], facts["type"]) == (f"fsdp{case.version}", "DistributedType.FSDP")
    assert facts["is the user's"]
    assert case.version == 1 or facts["tied"]
    assert [rank[name][0].losses for rank in ranks] == [outcome.losses] * size
    assert all(rank[name][0].weights == {} for rank in ranks[1:])
    shards = 1 if case.options.get("reshard_after_forward") == "NO_SHARD" else case.sizes.get("dp_shard_size", size)
    held = sum(rank[name][1]["numbers here"] for rank in ranks) / (size // shards)
    whole = sum(parameter.numel() for parameter in make_words().parameters())
    assert whole <= held <= 1.2 * whole  # flat parameters are filled up to a multiple of the ranks


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_one(name: str) -> None:
    check(name, TWO[name], 2, group_once(train_all, 2, "two"))


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_as_one(name: str) -> None:
    check(name, FOUR[name], 4, group_once(train_all, 4, "four"))


def test_a_window_is_divided_by_its_own_length() -> None:
    """Batches of 8 on each of two ranks make 3 micro-batches: a window of 2 and one of 1 in each epoch."""
    model = make_words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = make_text()
    for _ in range(2):
        for begin, end in ((0, 32), (32, 48)):
            loss_of(model, *data[begin:end]).backward()
            optimizer.step()
            optimizer.zero_grad()
    outcome, _ = group_once(train_all, 2, "two")[0]["2, a short window"]
    near(outcome.weights, model.state_dict(), EXACT)


def train_evaluated(case: Sharded, way: str, with_gradients: bool) -> Outcome:
    """Create the optimizer after a forward pass without a backward pass, and evaluate before gradients are clipped."""
    accelerator = case.accelerator()
    user, data = make_words(), make_text()
    if case.arrives_sharded:
        for module in (*user.layers, user):
            fully_shard(module)
        loss_of(user, *data[:4])
    model = accelerator.prepare_model(user, evaluation_mode=True)
    with torch.set_grad_enabled(with_gradients):
        loss_of(model, *data[:4])
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = WAYS[way](accelerator, model, optimizer)
    outcome, share = Outcome({}), STEP_SAMPLES // accelerator.num_processes
    for begin in range(accelerator.process_index * share, len(data), STEP_SAMPLES):
        loss = loss_of(model, *data[begin : begin + share])
        accelerator.backward(loss)
        if case.version == 2:  # version 1 computes the next pass with the weights that this one gathered
            with torch.set_grad_enabled(with_gradients):
                loss_of(model, *data[:4])
        outcome.losses.append(accelerator.reduce(loss.detach(), "mean").item())
        outcome.rates.append(accelerator.clip_grad_norm_(list(model.parameters()), case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights = accelerator.get_state_dict(model)
    return outcome


EVALUATIONS = [(name, way, with_gradients) for name in EVALUATED for way in WAYS for with_gradients in (False, True)]


def evaluate_all() -> dict[Any, Outcome]:
    return {key: train_evaluated(EVALUATED[key[0]], *key[1:]) for key in EVALUATIONS}


@pytest.mark.parametrize(("name", "way", "with_gradients"), EVALUATIONS)
def test_an_optimizer_created_after_an_evaluation_trains_every_weight(
    name: str, way: str, with_gradients: bool
) -> None:
    found = group_once(evaluate_all, 2)[0][name, way, with_gradients]
    assert_same_outcome(found, train_words_plainly(EVALUATED[name].clip, epochs=1), EXACT)
