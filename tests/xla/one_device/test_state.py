"""Checkpoints and files of an XLA device: exact, through host memory, and readable everywhere."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.xla import Task, largest_difference, run
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing import snapshot
from accelerate.state import AcceleratorState
from accelerate.utils import load, set_seed, synchronize_rng_state


class Dropping(Task):
    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(*super().model()[:2], torch.nn.Dropout(0.5), torch.nn.Linear(self.hidden, 3))


def prepared(task: Task, accelerator: Accelerator) -> list[Any]:
    model = task.model()
    optimizer = task.optimizer(model)
    return list(accelerator.prepare(model, optimizer, task.scheduler(optimizer), task.loader(shuffle=True)))


@pytest.mark.parametrize("accumulation", [1, 5])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_resumed_run_is_the_run(tmp_path: Path, accumulation: int, blocking: bool) -> None:
    """With dropout, shuffling, and in the middle of a window."""
    task = Dropping(steps=7, accumulation=accumulation)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    set_seed(5)
    objects = prepared(task, accelerator)
    losses = []
    model, optimizer, scheduler, loader = objects
    for number, (inputs, targets) in enumerate(loader, 1):
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if number == 7:
            accelerator.save_state(tmp_path / "state", blocking=blocking)
    accelerator.wait_for_save()
    expected = [float(loss) for loss in losses][7:]
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    set_seed(6)
    objects = prepared(task, accelerator)
    accelerator.load_state(tmp_path / "state")
    rest = Task(clip=None, steps=len(expected), accumulation=accumulation)
    assert run(rest, accelerator, *objects) == expected


class OnTheHost:
    def __init__(self) -> None:
        self.sums = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "again": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums.copy_(state["sums"])


def test_a_save_in_the_background_does_not_see_what_changes_after_it(tmp_path: Path, monkeypatch: Any) -> None:
    accelerator = Accelerator()
    model, *_ = prepared(Task(), accelerator)
    sums = OnTheHost()
    accelerator.register_for_checkpointing(sums)
    expected = model[0].weight.detach().cpu().clone()
    write, changed = snapshot.Snapshot.resolve, threading.Event()
    monkeypatch.setattr(snapshot.Snapshot, "resolve", lambda self: changed.wait(60) and write(self))
    accelerator.save_state(tmp_path / "state", blocking=False)
    sums.sums.add_(1.0)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    changed.set()
    accelerator.wait_for_save()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(sums.sums, torch.zeros(3))
    assert torch.equal(model[0].weight.detach().cpu(), expected)


def test_files_hold_host_tensors(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model, optimizer, *_ = prepared(Task(), accelerator)
    accelerator.backward(model(torch.ones(2, 8, device=accelerator.device)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "state")
    states = load(tmp_path / "state" / "random_states_0.pkl")
    assert isinstance(states["xm_seed"], int)
    moments = torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True)["state"][0]
    assert moments["exp_avg"].device.type == "cpu"
    accelerator.save({"weights": [model[0].weight], "number": 3}, tmp_path / "own.bin")
    own = torch.load(tmp_path / "own.bin", weights_only=True)
    assert torch.equal(own["weights"][0], model[0].weight.cpu())
    assert own["weights"][0].device.type == "cpu"
    accelerator.save(model.state_dict(), tmp_path / "own.safetensors", safe_serialization=True)
    accelerator.save_model(model, tmp_path / "model")
    loaded = Task().model()
    from safetensors.torch import load_file

    loaded.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"))
    assert torch.equal(loaded[0].weight, model[0].weight.cpu())


def test_seeds_of_the_device() -> None:
    accelerator = Accelerator()

    def draw() -> list[float]:
        return torch.rand(3, device=accelerator.device).cpu().tolist()

    set_seed(3)
    first = draw()
    second = draw()
    set_seed(3)
    assert (draw(), draw()) == (first, second)
    assert first != second
    synchronize_rng_state("xla")


@pytest.mark.parametrize("target", ["cpu", "on_device"])
def test_weights_are_read_to_host_memory_first(tmp_path: Path, target: str) -> None:
    accelerator = Accelerator()
    model, *_ = prepared(Task(), accelerator)
    accelerator.save_state(tmp_path / "state")
    before = model[0].weight.cpu()
    with torch.no_grad():
        model[0].weight.zero_()
    accelerator.load_state(tmp_path / "state", map_location=target)
    assert torch.equal(model[0].weight.cpu(), before)
    assert model[0].weight.device == accelerator.device


def test_a_model_evaluates(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare_model(Task().model(), evaluation_mode=True)
    loader = accelerator.prepare(DataLoader(Task().data(30), batch_size=20))
    with torch.no_grad():
        outputs = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in loader]
    expected = Task().model()(Task().data(30).tensors[0])
    found = torch.cat(outputs).cpu()
    assert largest_difference(found.flatten().tolist(), expected.flatten().tolist()) < 1e-5
