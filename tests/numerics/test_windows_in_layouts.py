"""A run that was saved in the middle of an accumulation window goes on in another layout of processes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gpt import Plan, TinyGPT, gpt_step, make_tokens
from tests.support.processes import run_group
from tests.support.sharding import near
from torch.utils.data import DataLoader

pytestmark = pytest.mark.multiprocess

WINDOW, ROWS, SEQUENCES = 4, 4, 48
STOPS_AFTER = 6
"""Micro-batches: one window has closed, and half of the next is summed up."""
ALONE = "one process"
PLANS: dict[int, dict[str, Plan]] = {
    1: {ALONE: Plan(accumulation=WINDOW)},
    2: {
        "replicas": Plan({"dp_replicate_size": 2}, accumulation=WINDOW),
        "tp": Plan({"tp_size": 2}, accumulation=WINDOW),
        "cp": Plan({"cp_size": 2}, accumulation=WINDOW),
        "pipeline": Plan({"pp_size": 2}, accumulation=WINDOW),
        "fsdp2": Plan({"dp_shard_size": 2}, fsdp=True, accumulation=WINDOW),
        "tp, items": Plan({"tp_size": 2}, accumulation=WINDOW, window=True),
        "replicas, items": Plan({"dp_replicate_size": 2}, accumulation=WINDOW, window=True),
    },
    4: {
        "fsdp2 of tp": Plan({"dp_shard_size": 2, "tp_size": 2}, fsdp=True, accumulation=WINDOW),
        "replicas of pipeline": Plan({"dp_replicate_size": 2, "pp_size": 2}, accumulation=WINDOW),
    },
}
LATER: dict[int, dict[str, tuple[str, ...]]] = {
    1: {ALONE: ("tp", "pipeline", "fsdp2 of tp")},
    2: {
        "replicas": ("tp", "pipeline"),
        "tp": (ALONE, "replicas", "replicas of pipeline"),
        "cp": ("fsdp2",),
        "pipeline": ("tp", "fsdp2 of tp"),
        "fsdp2": ("fsdp2 of tp",),
        "tp, items": ("replicas, items",),
        "replicas, items": ("tp, items",),
    },
    4: {"fsdp2 of tp": ("fsdp2 of tp", "cp")},
}
"""In which layouts runs go on -> in which ones they were saved."""
CASES = [
    (world_size, now, then)
    for world_size, layouts in LATER.items()
    for now, before in layouts.items()
    for then in before
]


def train(plan: Plan, source: str | None = None, target: str | None = None) -> dict[str, torch.Tensor]:
    """Train for three windows, or from the middle of the second on; save there, if a place is given."""
    accelerator = plan.accelerator()
    model: Any = TinyGPT(plan.dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(make_tokens(SEQUENCES), batch_size=ROWS // accelerator.strategy.data_shard()[1])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    if source is not None:
        accelerator.load_state(source)
        assert not accelerator.sync_gradients
        done = STOPS_AFTER
    for batch in loader:
        with accelerator.accumulate(model):
            gpt_step(accelerator, model, batch, plan)
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        if target is not None and done == STOPS_AFTER:
            accelerator.save_state(target)
    assert done == 3 * WINDOW
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def save_all(folder: str, world_size: int) -> dict[str, Any]:
    return {name: train(plan, target=f"{folder}/{name}") for name, plan in PLANS[world_size].items()}


def go_on(folder: str, world_size: int) -> dict[str, Any]:
    return {
        f"{then} -> {now}": train(PLANS[world_size][now], source=f"{folder}/{then}")
        for now, before in LATER[world_size].items()
        for then in before
    }


@cache
def expected() -> dict[str, torch.Tensor]:
    """Train on one process with plain PyTorch."""
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in make_tokens(SEQUENCES).split(WINDOW * ROWS):
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(Path(tmp_path_factory.mktemp("layouts")))
    found: dict[str, Any] = {}
    for world_size in PLANS:
        found |= run_group(save_all, world_size, folder, world_size)[0]
    for world_size in LATER:
        found |= run_group(go_on, world_size, folder, world_size)[0]
    return found


@pytest.mark.parametrize("name", [name for plans in PLANS.values() for name in plans])
def test_saving_in_a_window_changes_nothing(outcomes: dict[str, Any], name: str) -> None:
    near(outcomes[name], expected(), 1e-9)


@pytest.mark.parametrize(("world_size", "now", "then"), CASES)
def test_a_window_is_closed_in_another_layout(outcomes: dict[str, Any], world_size: int, now: str, then: str) -> None:
    near(outcomes[f"{then} -> {now}"], expected(), 1e-9)
