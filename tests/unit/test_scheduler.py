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
