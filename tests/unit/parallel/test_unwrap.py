"""The user's model and its forward inside of wrappers, and questions about its structure."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_group
from torch import nn

from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.parallel.tensor import get_model_tp_size, model_has_dtensor
from accelerate.parallel.unwrap import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    is_peft_model,
)
from accelerate.utils import convert_outputs_to_fp32


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


def in_bfloat16(forward: Any) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)(forward)


BY_HAND: dict[str, Callable[[Any], Any]] = {
    "outputs": lambda model: convert_outputs_to_fp32(model.forward),
    "autocast": lambda model: in_bfloat16(model.forward),
    "both": lambda model: convert_outputs_to_fp32(in_bfloat16(model.forward)),
    "bound": lambda model: MethodType(convert_outputs_to_fp32(in_bfloat16(type(model).forward)), model),
    "compiled": lambda model: torch.compile(convert_outputs_to_fp32(in_bfloat16(model.forward)), backend="eager"),
}


@pytest.mark.parametrize("wrap", BY_HAND.values(), ids=BY_HAND.keys())
def test_a_forward_that_was_wrapped_by_hand_is_undone(wrap: Callable[[Any], Any]) -> None:
    model: Any = nn.Linear(2, 2)
    plain = model(torch.ones(1, 2))
    model._original_forward = model.forward
    model.forward = wrap(model)
    assert extract_model_from_parallel(model).forward is model.__dict__["forward"]
    assert extract_model_from_parallel(model, keep_fp32_wrapper=False) is model
    assert not {"forward", "_original_forward"} & model.__dict__.keys()
    assert torch.equal(pickle.loads(pickle.dumps(model))(torch.ones(1, 2)), plain)


def test_what_was_put_in_its_place_and_hooks_around_it_stay() -> None:
    patched: Any = nn.Linear(2, 2)
    patched._original_forward = patched.forward
    own = patched.forward = lambda inputs: inputs
    assert extract_model_from_parallel(patched, keep_fp32_wrapper=False).forward is own
    hooked: Any = nn.Linear(2, 2)
    plain = hooked(torch.ones(1, 2))
    hooked._original_forward = hooked.forward
    hooked.forward = in_bfloat16(hooked.forward)
    add_hook_to_module(hooked, Doubled())
    assert hooked(torch.ones(1, 2)).dtype == torch.bfloat16
    extract_model_from_parallel(hooked, keep_fp32_wrapper=False)
    assert torch.equal(hooked(torch.ones(1, 2)), 2 * plain)
    remove_hook_from_module(hooked)
    assert torch.equal(pickle.loads(pickle.dumps(hooked))(torch.ones(1, 2)), plain)


class Doubled(ModelHook):
    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return 2 * output


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
