"""The prepared scheduler on one process: what it passes on, and when it steps."""

from __future__ import annotations

import pytest
import torch

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler


def scheduled() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def test_rates_are_those_of_the_inner_scheduler() -> None:
    optimizer, inner = scheduled()
    scheduler = AcceleratedScheduler(inner, optimizer)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]
    with pytest.warns(UserWarning, match="get_last_lr"):  # torch's own advice
        assert scheduler.get_lr() == [0.25]


def test_a_schedule_of_its_own_pace_steps_whenever_it_is_called() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
    optimizer, inner = scheduled()
    optimizer, scheduler = accelerator.prepare(optimizer, inner)
    with accelerator.accumulate():
        optimizer.optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_one_cycle_schedule_stays_at_its_end(steps: int) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=1.0, total_steps=3)
    model, optimizer, scheduler = accelerator.prepare(model, inner, cycle)
    rates = []
    for _ in range(5 * steps):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([0.46264, 0.0, 0.46264, 0.46264, 0.46264], abs=1e-5)  # as release 1.15 has them


def test_by_hand_a_one_cycle_schedule_ends_as_torch_ends_it() -> None:
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    optimizer, _ = scheduled()
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=3)
    optimizer, scheduler = accelerator.prepare(optimizer, cycle)
    optimizer.step()
    for _ in range(3):
        scheduler.step()
    with pytest.raises(ValueError, match="Tried to step 4 times"):
        scheduler.step()
