from __future__ import annotations

import gc
import threading
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.parts import OptimizerPart
from accelerate.checkpointing.snapshot import (
    DeferredCopy,
    Snapshot,
    copy_before_step,
    host_buffers,
    host_copy,
    run_in_threads,
)
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


def copied(optimizer: Any) -> Snapshot:
    snapshot = Snapshot([OptimizerPart(optimizer)])
    snapshot.copy_to_host()
    return snapshot


def resolved(snapshot: Snapshot) -> dict[str, Any]:
    snapshot.resolve()
    ((_, state),) = snapshot
    saved: dict[str, Any] = state
    return saved


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
    promise = copied(optimizer)
    assert isinstance(next(iter(promise))[1], DeferredCopy)
    plain.param_groups[0]["lr"] = 7.0
    for _ in range(3):
        step(optimizer)
    saved = resolved(promise)
    assert moments(saved) == expected
    assert saved["param_groups"][0]["lr"] == rate
    assert moments(plain.state_dict()) != expected


def test_a_step_waits_for_the_thread_that_copies() -> None:
    optimizer, slow = trained(), Slow()
    expected = moments(optimizer.state_dict())
    promise = copy_before_step(optimizer, optimizer.state_dict(), "optimizer 0", slow)
    saving = threading.Thread(target=promise.run)
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
        saved.append((moments(optimizer.state_dict()), copied(optimizer)))
        step(optimizer)
    assert [moments(resolved(promise)) for _, promise in saved] == [expected for expected, _ in saved]
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_state_that_something_else_changes_is_not_saved() -> None:
    optimizer = trained()
    promise = copied(optimizer)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()
    with pytest.raises(CheckpointError, match=r"optimizer 0 was changed .* accelerator\.wait_for_save\(\)"):
        resolved(promise)


def test_loading_another_state_leaves_the_promised_one_alone() -> None:
    optimizer = trained()
    expected = moments(optimizer.state_dict())
    promise = copied(optimizer)
    optimizer.load_state_dict(trained(3).state_dict())
    assert moments(resolved(promise)) == expected


def test_a_copy_that_fails_stops_the_save_and_not_the_training() -> None:
    def fail(state: Any) -> Any:
        raise MemoryError("no more")

    optimizer = trained()
    promise = copy_before_step(optimizer, optimizer.state_dict(), "optimizer 0", fail)
    step(optimizer)
    assert optimizer.state_dict()["state"][0]["step"] == 2
    with pytest.raises(MemoryError, match="no more"):
        promise.get()


def test_a_promise_that_nobody_keeps_is_not_waited_for() -> None:
    optimizer, slow = trained(), Slow()
    promise = copy_before_step(optimizer, optimizer.state_dict(), "optimizer 0", slow)
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
    saved = copied(own)
    own.finish()
    assert resolved(saved)["state"][0]["momentum_buffer"].tolist() == [1, 1, 1]


def test_a_hook_of_the_program_finds_the_state_copied() -> None:
    def spoil(optimizer: Any, *_: Any) -> None:
        optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].data.zero_()

    optimizer = trained()
    optimizer.register_step_pre_hook(spoil)
    expected = moments(optimizer.state_dict())
    promise = copied(optimizer)
    step(optimizer)
    assert moments(resolved(promise)) == expected


def test_a_schedule_may_change_the_rate_before_the_copy() -> None:
    weight = torch.nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([weight], lr=torch.tensor(0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weight.grad = torch.ones(5)
    optimizer.step()
    promise = copied(optimizer)
    schedule.step()
    assert resolved(promise)["param_groups"][0]["lr"].item() == 0.5
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
    promise = copied(optimizer)
    weight.grad = torch.arange(5.0)
    compiled()
    assert moments(resolved(promise)) == expected


class TestHostCopy:
    def test_structure_kinds_and_sharing_are_kept_and_nothing_is_common_with_the_original(self) -> None:
        shared = torch.arange(4.0)
        state = OrderedDict(a=shared, b=[shared, (shared[1:], 3)], c=defaultdict(list, x=[1]), d=torch.empty(0))
        state._metadata = "kept"  # type: ignore[attr-defined]
        copied = host_copy(state)
        assert type(copied) is OrderedDict
        assert copied._metadata == "kept"
        assert type(copied["c"]) is defaultdict
        assert copied["b"][0] is copied["a"]
        shared.zero_()
        state["c"]["x"].append(2)
        assert copied["a"].tolist() == [0, 1, 2, 3]
        assert copied["b"][1][0].tolist() == [1, 2, 3]
        assert copied["c"]["x"] == [1]

    def test_memory_is_used_again_once_it_is_given_back(self) -> None:
        state = {"a": torch.ones(1000), "b": torch.ones(10, 3).T, "c": torch.ones(7, dtype=torch.int16)}
        first = {name: tensor.data_ptr() for name, tensor in host_copy(state).items()}
        second = host_copy(state)
        assert all(second[name].data_ptr() != address for name, address in first.items())
        host_buffers().release()
        third = host_copy(state)
        addresses = {*first.values(), *(tensor.data_ptr() for tensor in second.values())}
        assert {tensor.data_ptr() for tensor in third.values()} <= addresses
        assert third["b"].tolist() == state["b"].tolist()

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_large_tensors_are_copied_in_pieces(self, num_threads: int) -> None:
        state = {
            "long": torch.arange(9 * 2**20, dtype=torch.int32),  # no multiple of a piece
            "turned": torch.arange(4 * 2**20, dtype=torch.int32).view(2048, -1).T,
            "odd": torch.arange(3 * 2**20 + 7, dtype=torch.int16),
        }
        for _ in range(2):  # in fresh memory, then in what was used before
            copied = host_copy(state, num_threads=num_threads)
            for name, tensor in state.items():
                assert torch.equal(copied[name], tensor), name
                assert copied[name].stride() == tensor.stride(), name
            for tensor in state.values():
                tensor.add_(1)
            host_buffers().release()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_item_is_done_once(num_threads: int) -> None:
    done: list[int] = []
    run_in_threads(done.append, range(1000), num_threads)
    assert sorted(done) == list(range(1000))


def test_threads_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=120)
    run_in_threads(lambda _: together.wait(), range(3), 3)
    assert not together.broken


def test_the_first_failure_is_raised_and_the_rest_is_left_out() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 3:
            raise OSError("the disk is full")
        done.append(item)

    with pytest.raises(OSError, match="the disk is full"):
        run_in_threads(work, range(1000), 1)
    assert done == [0, 1, 2]
