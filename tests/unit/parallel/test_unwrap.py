"""Questions about a model's structure."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist
from tests.support.processes import run_group
from torch import nn

from accelerate.parallel.tensor import get_model_tp_size, model_has_dtensor
from accelerate.parallel.unwrap import get_module_children_bottom_up, is_peft_model


def test_children_come_before_parents_in_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Tanh()))
    named = get_module_children_bottom_up(model, return_fqns=True)
    assert [name for name, _ in named] == ["0", "1.0", "1.1", "1", ""]
    assert get_module_children_bottom_up(model) == [module for _, module in named]
    assert named[-1][1] is model
    assert get_module_children_bottom_up(nn.ReLU(), return_fqns=True)[0][0] == ""


def test_tp_size_of_the_model_or_of_its_description() -> None:
    model = nn.Linear(2, 2)
    assert get_model_tp_size(model) is None
    model.config = SimpleNamespace(distributed_config={"tp_size": 2})  # type: ignore[assignment]
    assert get_model_tp_size(model) == 2
    model.config = SimpleNamespace(distributed_config=SimpleNamespace(tp_size=3))  # type: ignore[assignment]
    assert get_model_tp_size(model) == 3
    model.tp_size = 4  # type: ignore[assignment]
    assert get_model_tp_size(model) == 4


def test_a_plain_model_has_no_adapters() -> None:
    assert is_peft_model(nn.Linear(2, 2)) is False


def _has_dtensor() -> tuple[bool, bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo")
    try:
        model = nn.Linear(2, 2)
        before = model_has_dtensor(model)
        mesh = init_device_mesh("cpu", (1,))
        model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate()]))
        return before, model_has_dtensor(model)
    finally:
        dist.destroy_process_group()


def test_dtensors_are_found() -> None:
    assert run_group(_has_dtensor, 1) == [(False, True)]
