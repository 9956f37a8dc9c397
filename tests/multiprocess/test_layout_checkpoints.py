"""A run goes on from a checkpoint in another layout, on another number of processes, as if it had never stopped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gpt import STEP_SEQUENCES, Plan, TinyGPT, gpt_step, make_tokens
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

REPLICAS = Plan(accumulation=1)
CHAINS: list[tuple[int, list[Plan]]] = [
    (
        4,
        [
            Plan({"dp_replicate_size": 2, "tp_size": 2}, accumulation=1),
            REPLICAS,
            Plan({"dp_shard_size": 2, "tp_size": 2}, fsdp=True, accumulation=1),
            Plan({"cp_size": 2, "tp_size": 2}, accumulation=1),
        ],
    ),
    (
        2,
        [
            Plan({"pp_size": 2}, accumulation=1),
            Plan({"pp_size": 2}, accumulation=1),
            Plan({"dp_shard_size": 2}, fsdp=True, accumulation=1),
            Plan({"cp_size": 2}, accumulation=1),
            Plan({"tp_size": 2}, accumulation=1),
            REPLICAS,
        ],
    ),
]
STEPS = sum(len(plans) for _, plans in CHAINS)


def one_step(plan: Plan, source: str | None, target: str) -> float:
    """Go on for a step, and save."""
    accelerator = plan.accelerator() if plan.sizes else fresh_accelerator()
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = STEP_SEQUENCES // accelerator.strategy.data_shard()[1]
    loader = DataLoader(make_tokens(STEPS * STEP_SEQUENCES), batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if source is not None:
        accelerator.load_state(source)
    for batch in loader:
        loss = gpt_step(accelerator, model, batch, plan)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        break
    accelerator.save_state(target)
    return float(accelerator.reduce(loss.detach(), reduction="mean"))


def steps(folder: str, plans: list[Plan], first: int) -> list[float]:
    """Run a part of the chain in this group."""
    return [
        one_step(
            plan,
            str(Path(folder, str(first + place - 1))) if first + place else None,
            str(Path(folder, str(first + place))),
        )
        for place, plan in enumerate(plans)
    ]


@cache
def plain_losses() -> list[float]:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for batch in make_tokens(STEPS * STEP_SEQUENCES).split(STEP_SEQUENCES):
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    folder = tmp_path_factory.mktemp("chain")
    found: list[Any] = []
    first = 0
    for world_size, plans in CHAINS:
        found.append(run_group(steps, world_size, str(folder), plans, first))
        first += len(plans)
    return [losses for group in found for losses in [group[0]]]


def test_the_curve_is_that_of_a_run_that_never_stopped(chain: list[list[float]]) -> None:
    assert [loss for losses in chain for loss in losses] == pytest.approx(plain_losses(), abs=1e-9)
