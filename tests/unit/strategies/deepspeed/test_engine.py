"""How a loop of PyTorch drives an engine: passes first, one step after them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from accelerate._base.errors import ConfigurationError
from accelerate.runtime.gradient_clock import GradientState
from accelerate.strategies.deepspeed.engine import DeepSpeedEngineWrapper, is_training_engine
from accelerate.strategies.deepspeed.setup import choose_device
from accelerate.strategies.deepspeed.wrappers import DeepSpeedOptimizerWrapper, map_pytorch_optim_to_deepspeed


class RecordingEngine:
    """Note what is asked of an engine."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.module = torch.nn.Linear(2, 2)
        self.optimizer = self.basic_optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.device = torch.device("cpu")

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.calls.append(is_boundary)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.calls.append(("backward", float(loss), kwargs))

    def step(self) -> None:
        self.calls.append("step")

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")

    def get_global_grad_norm(self) -> torch.Tensor | None:
        return torch.tensor(2.5)


def test_the_public_backward_steps_at_the_end_of_a_window() -> None:
    engine = RecordingEngine()
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.backward(torch.tensor(1.0), sync_gradients=False)
    wrapper.backward(torch.tensor(2.0), scale_wrt_gas=False)
    wrapper.step()  # nothing is left to step with
    assert engine.calls == [
        False,
        ("backward", 1.0, {}),
        True,
        ("backward", 2.0, {"scale_wrt_gas": False}),
        "step",
    ]
    assert wrapper.get_global_grad_norm() == 2.5


def test_the_optimizer_steps_once_a_window() -> None:
    engine, clock = RecordingEngine(), GradientState()
    wrapper = DeepSpeedEngineWrapper(engine)
    optimizer = DeepSpeedOptimizerWrapper(engine.optimizer)
    optimizer.engine = wrapper
    for closes in (False, True):
        clock._set_sync_gradients(closes)
        wrapper.accumulate(torch.tensor(1.0), closes=closes)
        optimizer.step()
        optimizer.zero_grad()
    clock._set_sync_gradients(True)
    assert engine.calls.count("step") == 1
    assert engine.calls[-1] == "step"
    assert optimizer.step_was_skipped is False


def test_gradients_that_no_step_used_are_dropped() -> None:
    engine = RecordingEngine()
    optimizer = DeepSpeedOptimizerWrapper(engine.optimizer)
    optimizer.engine = DeepSpeedEngineWrapper(engine)
    optimizer.engine.accumulate(torch.tensor(1.0), closes=True)
    optimizer.zero_grad()
    optimizer.step()
    assert "zero_grad" in engine.calls
    assert "step" not in engine.calls


def test_a_closure_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot compute them again"):
        DeepSpeedOptimizerWrapper(RecordingEngine().optimizer).step(lambda: 0.0)


def test_an_overflow_is_told() -> None:
    optimizer: Any = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.overflow = True
    assert DeepSpeedOptimizerWrapper(optimizer).step_was_skipped


def test_an_optimizer_without_a_counterpart_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no optimizer for states in host memory that does what SGD does"):
        map_pytorch_optim_to_deepspeed(torch.optim.SGD([torch.zeros(1)], lr=0.1))


def test_what_is_an_engine() -> None:
    assert is_training_engine(RecordingEngine())
    assert not is_training_engine(torch.nn.Linear(1, 1))


def test_the_cpu_is_said_to_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "")  # so that it is put back
    monkeypatch.delenv("DS_ACCELERATOR")
    choose_device("cuda")
    assert "DS_ACCELERATOR" not in os.environ
    choose_device("cpu")
    assert os.environ["DS_ACCELERATOR"] == "cpu"
