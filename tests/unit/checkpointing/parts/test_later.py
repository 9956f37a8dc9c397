from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.parts import OptimizerPart
from accelerate.checkpointing.parts.later import Later, copied_before_step, settled
from accelerate.optimizer import AcceleratedOptimizer

LONG = 20.0


def trained(steps: int = 1, **options: Any) -> torch.optim.Adam:
    weight = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([weight], lr=0.1, **options)
    for _ in range(steps):
        step(optimizer)
    return optimizer


def step(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][0].grad = torch.arange(5.0)
    optimizer.step()


def moments(state: dict[str, Any]) -> list[float]:
    values: list[float] = state["state"][0]["exp_avg"].tolist()
    return values


class Slow:
    """A copy that begins, and ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, state: Any) -> Any:
        copied = {"state": {0: {"exp_avg": state["state"][0]["exp_avg"].clone()}}}
        self.begun.set()
        assert self.may_end.wait(LONG)
        return copied


@pytest.mark.parametrize("wraps", [False, True])
def test_a_step_copies_what_nobody_copied_yet(wraps: bool) -> None:
    plain = trained()
    optimizer: Any = AcceleratedOptimizer(plain) if wraps else plain
    expected, rate = moments(plain.state_dict()), plain.param_groups[0]["lr"]
    promise = OptimizerPart(optimizer).snapshot(copy=True)
    assert isinstance(promise, Later)
    plain.param_groups[0]["lr"] = 7.0
    for _ in range(3):
        step(optimizer)
    saved = settled(promise)
    assert moments(saved) == expected
    assert saved["param_groups"][0]["lr"] == rate
    assert moments(plain.state_dict()) != expected


def test_a_step_waits_for_the_thread_that_copies() -> None:
    optimizer, slow = trained(), Slow()
    expected = moments(optimizer.state_dict())
    promise = copied_before_step(optimizer, optimizer.state_dict(), "optimizer 0", slow)
    saving = threading.Thread(target=promise.settle)
    saving.start()
    assert slow.begun.wait(LONG)
    training = threading.Thread(target=step, args=(optimizer,))
    training.start()
    training.join(0.2)
    assert training.is_alive()
    assert moments(optimizer.state_dict()) == expected
    slow.may_end.set()
    training.join(LONG)
    saving.join(LONG)
    assert moments(promise.get()) == expected
    assert moments(optimizer.state_dict()) != expected


def test_two_saves_hold_two_moments() -> None:
    optimizer = trained()
    saved = []
    for _ in range(2):
        saved.append((moments(optimizer.state_dict()), OptimizerPart(optimizer).snapshot(copy=True)))
        step(optimizer)
    assert [moments(settled(promise)) for _, promise in saved] == [expected for expected, _ in saved]
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_state_that_something_else_changes_is_not_saved() -> None:
    optimizer = trained()
    promise = OptimizerPart(optimizer).snapshot(copy=True)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()
    with pytest.raises(CheckpointError, match=r"optimizer 0 was changed .* accelerator\.wait_for_save\(\)"):
        settled(promise)


def test_loading_another_state_leaves_the_promised_one_alone() -> None:
    optimizer = trained()
    expected = moments(optimizer.state_dict())
    promise = OptimizerPart(optimizer).snapshot(copy=True)
    optimizer.load_state_dict(trained(3).state_dict())
    assert moments(settled(promise)) == expected


def test_a_copy_that_fails_stops_the_save_and_not_the_training() -> None:
    def fail(state: Any) -> Any:
        raise MemoryError("no more")

    optimizer = trained()
    promise = copied_before_step(optimizer, optimizer.state_dict(), "optimizer 0", fail)
    step(optimizer)
    assert optimizer.state_dict()["state"][0]["step"] == 2
    with pytest.raises(MemoryError, match="no more"):
        promise.get()


def test_a_promise_that_nobody_keeps_is_not_waited_for() -> None:
    optimizer, slow = trained(), Slow()
    promise = copied_before_step(optimizer, optimizer.state_dict(), "optimizer 0", slow)
    del promise
    gc.collect()
    step(optimizer)
    assert not slow.begun.is_set()


class Own(torch.optim.SGD):
    """An optimizer of the program, with another way to change its state."""

    def finish(self) -> None:
        for state in self.state.values():
            state["momentum_buffer"].zero_()


def test_an_optimizer_of_the_program_is_copied_at_once() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    own = Own([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    own.step()
    saved = OptimizerPart(own).snapshot(copy=True)
    own.finish()
    assert saved["state"][0]["momentum_buffer"].tolist() == [1, 1, 1]


def test_a_hook_of_the_program_finds_the_state_copied() -> None:
    def spoil(optimizer: Any, *_: Any) -> None:
        optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].data.zero_()

    optimizer = trained()
    optimizer.register_step_pre_hook(spoil)
    expected = moments(optimizer.state_dict())
    promise = OptimizerPart(optimizer).snapshot(copy=True)
    step(optimizer)
    assert moments(settled(promise)) == expected


def test_a_schedule_may_change_the_rate_before_the_copy() -> None:
    weight = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight.grad = torch.ones(5)
    optimizer.step()
    promise = OptimizerPart(optimizer).snapshot(copy=True)
    schedule.step()
    assert settled(promise)["param_groups"][0]["lr"].item() == 0.5
    assert optimizer.param_groups[0]["lr"].item() != 0.5


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_step_waits_as_well() -> None:
    optimizer = trained()
    compiled = torch.compile(optimizer.step, backend="eager")
    weight = optimizer.param_groups[0]["params"][0]
    for _ in range(2):
        weight.grad = torch.arange(5.0)
        compiled()
    expected = moments(optimizer.state_dict())
    promise = OptimizerPart(optimizer).snapshot(copy=True)
    weight.grad = torch.arange(5.0)
    compiled()
    assert moments(settled(promise)) == expected
