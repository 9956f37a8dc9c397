"""Transformers' Trainer leaves models that were sharded at load as they are and trains them like DDP."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from tests.clients.test_presharded import DENSE, EXPERTS, load, make, tokens
from tests.support.processes import ProcessGroupFailure, run_group
from tests.support.training import fresh_accelerator

pytestmark = [
    pytest.mark.clients,
    pytest.mark.multiprocess,
    # Of the embedding that Transformers shards.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

STEPS, BATCH = 3, 4
RUNS: dict[int, dict[str, tuple[str, dict[str, int]]]] = {
    2: {
        "shards": (DENSE, {"fsdp_size": 2}),
        "shards, experts": (EXPERTS, {"fsdp_size": 2, "ep_size": 2}),
    },
    4: {
        "shards": (DENSE, {"fsdp_size": 4}),
        "shards, experts": (EXPERTS, {"fsdp_size": 4, "ep_size": 2}),
        "shards of tp": (DENSE, {"fsdp_size": 2, "tp_size": 2}),
        "shards of tp, experts": (EXPERTS, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}),
    },
}
CASES = [(world_size, name) for world_size, runs in RUNS.items() for name in runs]


EVALUATED = "shards, evaluated first"


def train(model: Any, folder: str, shares: int, *, evaluates_first: bool = False) -> dict[str, list[float]]:
    """Train with global batches of the same samples on any number of processes."""
    from transformers import Trainer, TrainingArguments

    fresh_accelerator()  # forgets the layout of an earlier run
    arguments = TrainingArguments(
        output_dir=f"{folder}/trained",
        per_device_train_batch_size=BATCH // shares,
        max_steps=STEPS,
        logging_steps=1,
        max_grad_norm=0.5,
        learning_rate=0.01,
        adam_epsilon=1e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=True,  # experts without a token have no gradient
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:6])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        if evaluates_first:
            trainer.evaluate()
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [float(entry["grad_norm"]) for entry in logged],
        "eval": [trainer.evaluate()["eval_loss"]],
    }


def everything(folder: str, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, sizes) in RUNS[world_size].items():
        fresh_accelerator(cpu=True)
        found[name] = train(load(folder, kind, sizes, torch.float32), folder, sizes["fsdp_size"])
    if world_size == 2:
        fresh_accelerator(cpu=True)
        found[EVALUATED] = train(load(folder, *RUNS[2]["shards"], torch.float32), folder, 2, evaluates_first=True)
        for kind in (DENSE, EXPERTS):
            found[kind] = train(make(kind).float(), folder, world_size)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    for kind in (DENSE, EXPERTS):
        make(kind).save_pretrained(folder / kind)
    return str(folder)


@cache
def _started(folder: str, world_size: int) -> dict[str, Any] | ProcessGroupFailure:
    try:
        return run_group(everything, world_size, folder, world_size)[0]
    except ProcessGroupFailure as failure:
        return failure


def results(folder: str, world_size: int) -> dict[str, Any]:
    found = _started(folder, world_size)
    if isinstance(found, ProcessGroupFailure):
        raise found
    return found


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_a_model_sharded_at_load_trains_as_under_ddp(models: str, world_size: int, name: str) -> None:
    found, expected = results(models, world_size)[name], results(models, 2)[RUNS[world_size][name][0]]
    assert len(found["losses"]) == STEPS
    for curve in ("losses", "norms", "eval"):
        assert found[curve] == pytest.approx(expected[curve], abs=1e-5), curve


def test_an_evaluation_before_the_training_changes_nothing(models: str) -> None:
    found = results(models, 2)
    for curve in ("losses", "norms", "eval"):
        assert found[EVALUATED][curve] == pytest.approx(found["shards"][curve], rel=1e-6), curve
