"""The prepared optimizer: what it passes on, and optimizers that are made otherwise than torch's."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate.optimizer import AcceleratedOptimizer, move_to_device
from accelerate.utils import GradScalerKwargs


def sgd(lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=lr)


class Unhooked(torch.optim.Optimizer):
    """An optimizer that never calls torch's constructor, as some wrappers do: it has no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self) -> None:
        self.inner.zero_grad()


def test_state_groups_and_defaults_are_those_of_the_inner_optimizer() -> None:
    inner = sgd()
    prepared = AcceleratedOptimizer(inner)
    group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5}
    prepared.add_param_group(group)
    assert [entry["lr"] for entry in inner.param_groups] == [0.1, 0.5]
    prepared.param_groups = inner.param_groups[:1]
    prepared.state = {"kept": torch.ones(1)}
    prepared.defaults = {"lr": 0.3}
    assert len(inner.param_groups) == 1
    assert inner.state == prepared.state == {"kept": torch.ones(1)}
    assert inner.defaults == prepared.defaults == {"lr": 0.3}
    assert "SGD" in repr(prepared)


def search_lines(accelerator: Accelerator | None) -> list[float]:
    """Train by LBFGS, which calls a closure several times a step, and return what each step returned."""
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(3, 1)
    inputs = torch.randn(16, 3)
    optimizer: Any = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs).squeeze(1) - inputs.sum(dim=1)).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        return loss

    return [optimizer.step(closure).item() for _ in range(4)]


def test_a_step_with_a_closure_returns_its_loss() -> None:
    assert search_lines(Accelerator()) == search_lines(None)


def test_a_mode_is_switched_where_the_optimizer_has_one() -> None:
    calls: list[str] = []
    inner: Any = sgd()
    prepared = AcceleratedOptimizer(inner)
    prepared.train()  # torch's own have no modes: nothing happens
    inner.train, inner.eval = (lambda: calls.append("train")), (lambda: calls.append("eval"))
    prepared.train()
    prepared.eval()
    wrapped: Any = sgd()
    wrapped.optimizer = inner  # a wrapper of another library, whose inner optimizer has the modes
    AcceleratedOptimizer(wrapped).eval()
    assert calls == ["train", "eval", "eval"]


def test_an_optimizer_that_cannot_keep_gradients_says_so() -> None:
    prepared = AcceleratedOptimizer(Unhooked(sgd()))
    prepared.zero_grad()
    with pytest.raises(ConfigurationError, match=r"zero_grad\(set_to_none=False\).*Unhooked.*without it"):
        prepared.zero_grad(set_to_none=False)


def test_a_skipped_step_is_seen_without_hooks_too() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])
    model = torch.nn.Linear(2, 1, bias=False)
    model, optimizer = accelerator.prepare(model, Unhooked(torch.optim.SGD(model.parameters(), lr=0.1)))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not optimizer.step_was_skipped
    model.weight.grad = torch.full_like(model.weight, torch.inf)
    before = model.weight.detach().clone()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(model.weight, before)


def test_a_scaler_of_the_program_is_updated_after_the_step() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    prepared = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler=scaler)
    scaler.scale(parameter.sum()).backward()
    prepared.step()
    assert parameter.item() == 0.0
    assert scaler.get_scale() == 8.0
    again = pickle.loads(pickle.dumps(prepared))
    assert not again.step_was_skipped


def test_every_tensor_of_a_nested_state_is_moved() -> None:
    moved = move_to_device({"a": [torch.ones(1)], "b": (torch.zeros(1), 3)}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["b"][0].is_meta
    assert moved["b"][1] == 3


class TestLomo:
    """Optimizers of `lomo_optim` update the weights inside the backward pass; the package is not needed to be known."""

    @pytest.fixture
    def lomo(self, monkeypatch: pytest.MonkeyPatch) -> type[torch.optim.Optimizer]:
        class Lomo(torch.optim.Optimizer):
            def __init__(self, model: torch.nn.Module, lr: float) -> None:
                super().__init__(model.parameters(), {"lr": lr})

            def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
                torch.autograd.backward(loss)
                with torch.no_grad():
                    for parameter in self.param_groups[0]["params"]:
                        parameter -= lr * parameter.grad
                        parameter.grad = None

            def step(self, closure: Any = None) -> Any:
                raise AssertionError("its step is inside of backward")

        Lomo.__module__ = "lomo_optim.lomo"
        monkeypatch.setitem(sys.modules, "lomo_optim", ModuleType("lomo_optim"))
        return Lomo

    def test_backward_updates_and_step_only_counts(self, lomo: Any) -> None:
        accelerator = Accelerator()
        model = torch.nn.Linear(2, 1, bias=False)
        model, optimizer = accelerator.prepare(model, lomo(model, lr=0.5))
        before = model.weight.detach().clone()
        assert accelerator.has_lomo_optimizer
        accelerator.backward(model(torch.ones(1, 2)).sum(), learning_rate=0.5)
        optimizer.step()
        assert torch.equal(model.weight, before - 0.5)
        accelerator.lomo_backward(model(torch.ones(1, 2)).sum(), 0.5)
        assert torch.equal(model.weight, before - 1.0)
        assert accelerator.progress.step == 1

    def test_a_learning_rate_is_needed(self, lomo: Any) -> None:
        accelerator = Accelerator()
        model = torch.nn.Linear(2, 1)
        model, _ = accelerator.prepare(model, lomo(model, lr=0.5))
        with pytest.raises(ConfigurationError, match=r"learning_rate=None and 1 LOMO.*learning_rate=\.\.\."):
            accelerator.backward(model(torch.ones(1, 2)).sum())
