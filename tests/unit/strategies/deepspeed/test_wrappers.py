"""What stands for an optimizer and a schedule of DeepSpeed."""

from __future__ import annotations

import torch

from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper, DummyOptim, DummyScheduler


def test_an_optimizer_of_the_configuration_keeps_what_it_was_given() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert vars(DummyOptim(parameters)) == {"params": parameters, "lr": 0.001, "weight_decay": 0, "kwargs": {}}
    assert vars(DummyOptim(parameters, 0.1, 0.2, betas=(0.9, 0.95))) == {
        "params": parameters,
        "lr": 0.1,
        "weight_decay": 0.2,
        "kwargs": {"betas": (0.9, 0.95)},
    }


def test_a_schedule_of_the_configuration_keeps_what_it_was_given() -> None:
    optimizer = DummyOptim([torch.nn.Parameter(torch.ones(2))])
    assert vars(DummyScheduler(optimizer, 10, 2, min_lr=0.1)) == {
        "optimizer": optimizer,
        "total_num_steps": 10,
        "warmup_num_steps": 2,
        "lr_scheduler_callable": None,
        "kwargs": {"min_lr": 0.1},
    }


def test_a_schedule_of_the_engine_is_stepped_by_nobody_else() -> None:
    Accelerator(cpu=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    inner = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule = DeepSpeedSchedulerWrapper(inner, optimizer)
    assert isinstance(schedule, AcceleratedScheduler)
    schedule.step()
    assert inner.last_epoch == 0
    assert schedule.get_last_lr() == [0.1]
    assert schedule.state_dict() == inner.state_dict()
    assert schedule.optimizers == [optimizer]
