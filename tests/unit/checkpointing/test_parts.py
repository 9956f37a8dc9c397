from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.checkpoints import load_part as load
from tests.support.checkpoints import save_part as save

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.parts import (
    ModelPart,
    OptimizerPart,
    SchedulerPart,
    WeightsPart,
)
from accelerate.checkpointing.run_parts import CustomPart


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ],
)
def test_schedulers_of_torch_are_read_without_running_code(tmp_path: Path, make: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    schedule = make(optimizer := torch.optim.SGD([weight], lr=0.1))
    arguments = [1.0] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []
    optimizer.step()
    schedule.step(*arguments)
    save(SchedulerPart(schedule), tmp_path)
    other = make(torch.optim.SGD([weight], lr=0.1))
    load(SchedulerPart(other), tmp_path)
    assert other.last_epoch == schedule.last_epoch
    assert other.get_last_lr() == schedule.get_last_lr()


OPTIMIZERS = [
    name
    for name in torch.optim.__all__
    if isinstance(kind := getattr(torch.optim, name), type) and issubclass(kind, torch.optim.Optimizer)
]


def stepped(kind: str) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Return an optimizer after its first step, and a new one of the same parameters."""
    parameters = [torch.nn.Parameter(torch.ones(3, 2))]
    if kind != "Muon":  # for matrices only
        parameters.append(torch.nn.Parameter(torch.ones(4)))
    make = getattr(torch.optim, kind)
    optimizer, other = make(parameters, lr=0.1), make(parameters, lr=0.2)
    for parameter in parameters:
        parameter.grad = torch.rand_like(parameter)
        if kind == "SparseAdam":
            parameter.grad = parameter.grad.to_sparse()
    optimizer.step(*[lambda: torch.tensor(1.0)] if kind == "LBFGS" else [])
    return optimizer, other


@pytest.mark.parametrize("kind", [name for name in OPTIMIZERS if name != "Optimizer"])
def test_optimizers_of_torch_come_back(tmp_path: Path, kind: str) -> None:
    optimizer, other = stepped(kind)
    save(OptimizerPart(optimizer), tmp_path)
    load(OptimizerPart(other), tmp_path)
    assert other.param_groups[0]["lr"] == 0.1
    assert other.state.keys() == optimizer.state.keys()


# SGD, Muon and LBFGS create states that are missing; those of Adafactor depend on the shape of the parameter.
OTHER_STATES = ("Optimizer", "SGD", "Muon", "LBFGS", "Adafactor")


@pytest.mark.parametrize("kind", [name for name in OPTIMIZERS if name not in OTHER_STATES])
def test_optimizer_states_without_an_entry_are_refused(tmp_path: Path, kind: str) -> None:
    optimizer, other = stepped(kind)
    states = list(optimizer.state.values())
    for name in list(states[-1]):
        kept = states[-1].pop(name)
        save(OptimizerPart(optimizer), tmp_path)
        with pytest.raises(CheckpointError, match=f"no '{name}' of parameter {len(states) - 1}, which {kind}"):
            load(OptimizerPart(other), tmp_path)
        states[-1][name] = kept
    assert other.param_groups[0]["lr"] == 0.2


def test_betas_of_another_number_are_refused(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    saved = torch.optim.Adam([parameter])
    saved.param_groups[0]["betas"] = (0.9,)
    save(OptimizerPart(saved), tmp_path)
    with pytest.raises(CheckpointError, match=r"betas=\(0\.9,\)"):
        load(OptimizerPart(torch.optim.Adam([parameter])), tmp_path)


def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    save(ModelPart(torch.compile(model, backend="eager")), tmp_path)  # type: ignore[arg-type]
    other = torch.nn.Linear(2, 1)
    load(ModelPart(other), tmp_path)
    assert torch.equal(other.weight, model.weight)


def test_weights_at_hand_are_written_and_read(tmp_path: Path) -> None:
    weights = torch.nn.Linear(2, 1).state_dict()
    for safe in (True, False):
        save(WeightsPart(weights, 2, safe_serialization=safe), tmp_path)
        part = WeightsPart(None, 2)
        load(part, tmp_path)
        assert part.weights().keys() == weights.keys()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model_2.safetensors", "pytorch_model_2.bin"]


def test_a_file_with_other_objects_needs_trust(tmp_path: Path) -> None:
    held = SimpleNamespace(state_dict=lambda: {"kind": SimpleNamespace()}, load_state_dict=lambda state: None)
    save(SchedulerPart(held), tmp_path)
    save(CustomPart(held), tmp_path)
    for part, name in ((SchedulerPart(held), "scheduler.bin"), (CustomPart(held), "custom_checkpoint_0.pkl")):
        with pytest.raises(RuntimeError, match=rf"{name}' is not read.*types\.SimpleNamespace.*weights_only"):
            load(part, tmp_path)
        load(part, tmp_path, load_kwargs={"weights_only": False})
