"""`Accelerator(global_batch_size=...)` trains the same on any number of processes; without it a fast schedule is named."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.support.training import (
    Layout,
    Outcome,
    Recipe,
    assert_same_outcome,
    fresh_accelerator,
    group_once,
    make_data,
    make_model,
    run_checks,
    train,
    train_plain,
)
from torch.utils.data import DataLoader
from transformers import get_scheduler

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.helpers import reset_warnings
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

pytestmark = pytest.mark.multiprocess

WORLD_SIZES = (1, 2, 3)
CURVES = {
    "uneven": (Recipe("adamw", 0.5, True, samples=50, step_samples=16), (16, 7, 3, 64)),
    "single last sample": (Recipe("sgd", None, True, samples=25, step_samples=8), (8, 3)),
    "one step an epoch": (Recipe("sgd", None, False, samples=6, step_samples=100), (100, 4)),
}


def curves() -> dict[str, Outcome]:
    return {
        f"{name}/{batch_size}": train(recipe, Layout(batch_size, global_batch_size=recipe.step_samples))
        for name, (recipe, sizes) in CURVES.items()
        for batch_size in sizes
    }


def scheduled_steps() -> dict[str, Any]:
    """Count optimizer steps, and record a schedule of 10 steps that ends in zero."""
    found: dict[str, Any] = {}
    for drop_last in (False, True):
        accelerator = fresh_accelerator(global_batch_size=8)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=10)
        loader = DataLoader(make_data(27), batch_size=3, drop_last=drop_last, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        rates, micro_batches = [], 0
        for _ in range(3):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    micro_batches += 1
                    accelerator.backward((model(inputs) - targets).square().mean())
                    if accelerator.sync_gradients:
                        rates.append(schedule.get_last_lr()[0])
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            assert micro_batches % len(loader) == 0
        found[f"drop_last={drop_last}"] = rates
    return found


def step_outside_of_accumulate() -> str:
    accelerator = fresh_accelerator(global_batch_size=12)
    model, loader = accelerator.prepare(make_model(), DataLoader(make_data(24), batch_size=2))
    with pytest.raises(UsageError) as caught:
        for inputs, _ in loader:
            accelerator.backward(model(inputs).mean())
    return str(caught.value)


def whole_batches_need_no_accumulate() -> int:
    accelerator = fresh_accelerator(global_batch_size=12)
    model, loader = accelerator.prepare(make_model(), DataLoader(make_data(24), batch_size=12))
    for inputs, _ in loader:
        accelerator.backward(model(inputs).mean())
    return len(loader)


def pace_warnings(
    schedule: str = "linear", horizon: int = 10, steps: int = 1, batch_size: int = 2, **options: Any
) -> list[str]:
    """Return the warnings of a loop over 12 batches of one process's size, with two epochs and two schedules."""
    reset_warnings()
    plugin = GradientAccumulationPlugin(num_steps=steps)
    accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin, **options)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedules = {
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=horizon),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=horizon),
        "one cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=horizon),
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        "transformers": lambda: get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=horizon),
        "sequence": lambda: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=horizon - 4),
            ],
            milestones=[4],
        ),
    }
    scheduler = schedules[schedule]()
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, scheduler, DataLoader(make_data(24), batch_size=batch_size)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward((model(inputs) - targets).square().mean())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    return [str(entry.message) for entry in caught]


def pace() -> dict[str, list[str]]:
    world_size = fresh_accelerator().num_processes
    return {
        "short": pace_warnings(horizon=10),
        "cosine": pace_warnings("cosine", horizon=10),
        "unknown": pace_warnings("lambda"),
        "transformers, short": pace_warnings("transformers", horizon=10),
        "sequence, short": pace_warnings("sequence", horizon=10),
        "transformers": pace_warnings("transformers", horizon=24),
        "sequence": pace_warnings("sequence", horizon=24),
        "prepared length": pace_warnings(horizon=-(-24 // (5 * world_size)) * world_size * 2, batch_size=5),
        "one epoch": pace_warnings(horizon=12),
        "three epochs": pace_warnings(horizon=36),
        "one cycle": pace_warnings("one cycle", horizon=24),
        "accumulated epoch": pace_warnings(horizon=6, steps=2),
        "accumulated, short": pace_warnings(horizon=5, steps=2),
        "dispatched epoch": pace_warnings(horizon=12, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)),
        "split": pace_warnings(horizon=10, batch_size=6, dataloader_config=DataLoaderConfiguration(split_batches=True)),
        "by hand": pace_warnings(horizon=10, step_scheduler_with_optimizer=False),
        "world-size-free": pace_warnings(horizon=10, global_batch_size=4),
    }


CHECKS = [curves, scheduled_steps, step_outside_of_accumulate, whole_batches_need_no_accumulate, pace]


def results(world_size: int) -> list[dict[str, Any]]:
    checks = [check for check in CHECKS if world_size == 1 or check is not whole_batches_need_no_accumulate]
    return group_once(run_checks, world_size, *checks)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CURVES)
def test_losses_rates_and_weights_do_not_depend_on_the_number_of_processes(name: str, world_size: int) -> None:
    recipe, batch_sizes = CURVES[name]
    expected = train_plain(recipe)
    for found in results(world_size):
        for batch_size in batch_sizes:
            assert_same_outcome(found["curves"][f"{name}/{batch_size}"], expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("drop_last", "steps_an_epoch"), [(False, 4), (True, 3)])
def test_optimizer_steps_and_the_end_of_a_schedule_are_exact(
    drop_last: bool, steps_an_epoch: int, world_size: int
) -> None:
    expected = [max(0.0, 1 - step / 10) for step in range(3 * steps_an_epoch)]
    for found in results(world_size):
        assert found["scheduled_steps"][f"drop_last={drop_last}"] == pytest.approx(expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_part_of_a_global_batch_outside_of_accumulate_is_refused(world_size: int) -> None:
    for found in results(world_size):
        assert "accumulate" in found["step_outside_of_accumulate"]
        assert "12 samples" in found["step_outside_of_accumulate"]


def test_a_whole_global_batch_needs_no_accumulate() -> None:
    assert results(1)[0]["whole_batches_need_no_accumulate"] == 2


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "horizon"),
    [
        ("short", 10),
        ("cosine", 10),
        ("transformers, short", 10),
        ("sequence, short", 10),
        ("accumulated, short", 5),
    ],
)
def test_a_schedule_that_ends_too_early_is_named_once_with_both_numbers(
    name: str, horizon: int, world_size: int
) -> None:
    main, *others = [found["pace"][name] for found in results(world_size)]
    assert len(main) == 1
    assert f"advances {world_size} steps" in main[0]
    assert f"{horizon} steps ends after {-(-horizon // world_size)} updates" in main[0]
    assert others == [[]] * (world_size - 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_schedule_of_unknown_length_is_named_once(world_size: int) -> None:
    assert len(results(world_size)[0]["pace"]["unknown"]) == 1


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "name",
    [
        "transformers",
        "sequence",
        "prepared length",
        "one epoch",
        "three epochs",
        "one cycle",
        "accumulated epoch",
        "dispatched epoch",
        "split",
        "by hand",
        "world-size-free",
    ],
)
def test_a_schedule_that_was_written_for_this_pace_is_not_named(name: str, world_size: int) -> None:
    for found in results(world_size):
        assert found["pace"][name] == []


def test_one_process_has_no_pace() -> None:
    assert set(map(tuple, results(1)[0]["pace"].values())) == {()}


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_a_global_batch_size_that_is_no_number_of_samples_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match="global_batch_size"):
        fresh_accelerator(global_batch_size=size)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
        {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
        {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
    ],
)
def test_settings_that_contradict_a_global_batch_size_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="global_batch_size=8"):
        fresh_accelerator(global_batch_size=8, **options)
