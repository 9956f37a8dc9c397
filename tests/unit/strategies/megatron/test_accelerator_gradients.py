"""Gradients in Megatron's buffers mean to a loop what those of torch's parameters do."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate._base.errors import UsageError
from accelerate.strategies.megatron.accelerator_gradients import BufferedLoss, GradientBuffers


class Chunk:
    """What a wrapper of Megatron shows of its gradients."""

    def __init__(self) -> None:
        self.buffers = [SimpleNamespace(grad_data=torch.zeros(3))]
        self.expert_parallel_buffers = [SimpleNamespace(grad_data=torch.zeros(2))]

    def zero_grad_buffer(self) -> None:
        for buffer in self.buffers + self.expert_parallel_buffers:
            buffer.grad_data.zero_()


class Loop:
    """The same operations on a tensor of torch and on buffers."""

    def __init__(self) -> None:
        self.chunk = Chunk()
        self.buffers = GradientBuffers([self.chunk])
        self.anchor = torch.zeros((), requires_grad=True)
        self.weight = torch.zeros((), requires_grad=True)
        self.losses: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, number: int) -> None:
        self.buffers.begin_pass()
        assert all(float(tensor.abs().sum()) == 0 for tensor in self.buffers.tensors)
        for tensor in self.buffers.tensors:
            tensor.add_(float(number))
        passed = self.buffers.end_pass()
        loss = BufferedLoss.apply(self.anchor, torch.tensor(float(number)), self.buffers, passed)  # type: ignore[no-untyped-call]
        self.losses[number] = (loss, self.weight * number)

    def backward(self, numbers: Sequence[int], factor: float = 1.0) -> None:
        for side in range(2):
            sum(self.losses[number][side] * factor for number in numbers).backward()  # type: ignore[union-attr]

    def let_go(self, number: int) -> None:
        del self.losses[number]

    def zero(self) -> None:
        self.buffers.zero()
        self.weight.grad = None

    def check(self) -> None:
        expected = 0.0 if self.weight.grad is None else float(self.weight.grad)
        assert self.buffers.are_there == (self.weight.grad is not None)
        self.buffers.settle()
        for tensor in self.buffers.tensors:
            assert tensor.tolist() == [pytest.approx(expected)] * len(tensor)


LOOPS: dict[str, list[tuple[Any, ...]]] = {
    "one batch": [("forward", 1), ("backward", [1])],
    "a part of the loss": [("forward", 4), ("backward", [4], 0.25)],
    "two batches of a window": [("forward", 1), ("backward", [1], 0.5), ("forward", 3), ("backward", [3], 0.5)],
    "zeroed before": [("forward", 1), ("backward", [1]), ("zero",), ("forward", 3), ("backward", [3])],
    "zeroed between": [("forward", 1), ("backward", [1]), ("forward", 3), ("zero",), ("backward", [3])],
    "zeroed after": [("forward", 1), ("backward", [1]), ("zero",)],
    "a loss that is let go": [("forward", 1), ("let_go", 1), ("forward", 2), ("backward", [2])],
    "a loss that is kept": [("forward", 1), ("forward", 2), ("backward", [2])],
    "a loss in a window that is let go": [("forward", 1), ("backward", [1]), ("forward", 5), ("let_go", 5)],
    "a loss in a window that is kept": [("forward", 1), ("backward", [1]), ("forward", 5)],
    "none but one that is let go": [("forward", 5), ("let_go", 5), ("zero",)],
    "two losses at once": [("forward", 1), ("forward", 2), ("backward", [1, 2], 0.5)],
    "two losses, the first one last": [("forward", 1), ("forward", 2), ("backward", [2]), ("backward", [1], 3.0)],
    "three losses in a window": [
        ("forward", 1),
        ("backward", [1]),
        ("forward", 2),
        ("forward", 4),
        ("backward", [2]),
        ("forward", 8),
        ("backward", [8, 4]),
    ],
}


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_in_buffers_are_those_of_torch(name: str) -> None:
    loop = Loop()
    for operation, *arguments in LOOPS[name]:
        getattr(loop, operation)(*arguments)
    loop.check()


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_mean_the_same_if_they_are_looked_at_after_each_operation(name: str) -> None:
    loop = Loop()
    for operation, *arguments in LOOPS[name]:
        getattr(loop, operation)(*arguments)
        loop.check()


def test_a_pass_that_fails_leaves_no_gradients() -> None:
    loop = Loop()
    loop.forward(1)
    loop.backward([1])
    loop.buffers.begin_pass()
    loop.chunk.buffers[0].grad_data.fill_(torch.nan)
    loop.check()


def test_backward_twice_is_refused() -> None:
    loop = Loop()
    loop.forward(1)
    loss = loop.losses[1][0]
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="twice"):
        loss.backward()


def test_gradients_of_an_open_window_go_into_another_run() -> None:
    loop, other = Loop(), Loop()
    loop.forward(3)
    loop.backward([3])
    loop.buffers.scale(2.0)
    state = {name: tensor.clone() for name, tensor in loop.buffers.state().items()}
    other.forward(7)
    other.buffers.load_state(state)
    other.weight.grad = torch.tensor(6.0)
    other.check()
    other.forward(1)
    other.backward([1])
    other.check()
    other.buffers.load_state({})
    other.weight.grad = None
    other.check()
    assert other.buffers.state() == {}
