"""What the strategies of XLA devices do to a model that any device shows."""

from __future__ import annotations

import torch

from accelerate.strategies.xla.strategy import move_keeping_ties


def test_a_move_keeps_ties_and_attributes() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    model["a"].weight.mark = "kept"
    model["a"].weight.requires_grad_(False)
    model.register_buffer("empty", None)
    before = model["a"].weight
    moved = move_keeping_ties(model, torch.device("meta"))
    assert moved is model
    assert model["a"].weight is model["b"].weight is not before
    assert (model["a"].weight.device.type, model["a"].weight.mark) == ("meta", "kept")
    assert not model["a"].weight.requires_grad
