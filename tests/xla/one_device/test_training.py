"""Training on one XLA device: the numbers of a plain process, and no more graphs than a loop by hand compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
from tests.support.xla import Task, compilations, largest_difference, losses_by_hand, losses_of

from accelerate import Accelerator
from accelerate.data_loader import MpDeviceLoaderWrapper
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin


def test_the_state_says_where_it_is() -> None:
    state = PartialState()
    assert (state.distributed_type, state.num_processes, state.device.type) == (DistributedType.XLA, 1, "xla")
    assert not state.use_distributed


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_losses_equal_those_of_a_plain_process(accumulation: int, clip: float | None) -> None:
    task = Task(accumulation=accumulation, clip=clip)
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    found = losses_of(task, accelerator)
    assert (accelerator.distributed_type, accelerator.num_processes) == (DistributedType.XLA, 1)
    assert accelerator.device == torch.device("xla:0")
    assert largest_difference(found, losses_by_hand(task)) < 2e-6


def test_bf16_is_near(recwarn: Any) -> None:
    task = Task(mixed_precision="bf16")
    found = losses_of(task, Accelerator(mixed_precision="bf16"))
    assert 0 < largest_difference(found, losses_by_hand(Task())) < 0.02
    assert largest_difference(found, losses_by_hand(task)) < 0.02


@pytest.mark.parametrize(("accumulation", "graphs"), [(1, 2), (4, 4)])
def test_a_loop_with_steady_shapes_compiles_as_many_graphs_as_one_by_hand(accumulation: int, graphs: int) -> None:
    task = Task(hidden=30 + accumulation, accumulation=accumulation, steps=24)
    with compilations() as ours:
        found = losses_of(task, Accelerator(gradient_accumulation_steps=accumulation))
    with compilations() as by_hand:
        expected = losses_by_hand(task, torch_xla.device(), torch_xla.sync)
    assert ours.count == by_hand.count == graphs
    assert largest_difference(found, expected) < 2e-6


def test_a_longer_run_compiles_nothing_more() -> None:
    task = Task(hidden=41, steps=10)
    losses_of(task, Accelerator())
    with compilations() as later:
        losses_of(Task(hidden=41, steps=60), Accelerator())
    assert later.count == 0


def test_a_loop_without_a_prepared_loader_ends_its_steps_too() -> None:
    accelerator = Accelerator()
    model = Task(hidden=43).model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(4, 8, device=accelerator.device)
    with compilations() as loop:
        for _ in range(6):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert loop.count == 1


def test_short_windows_are_exact() -> None:
    """The last window of an epoch is short: 12 batches in windows of 5."""
    task = Task(accumulation=5, steps=20)
    plugin = GradientAccumulationPlugin(num_steps=5, normalize="window")
    on_device = losses_of(task, Accelerator(gradient_accumulation_plugin=plugin))
    AcceleratorState._reset_state(True)
    on_cpu = losses_of(task, Accelerator(gradient_accumulation_plugin=plugin, cpu=True))
    assert largest_difference(on_device, on_cpu) < 2e-6


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 4)
        self.head = torch.nn.Linear(4, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens)) * self.scale


def test_tied_weights_stay_tied_and_optimizers_follow() -> None:
    accelerator = Accelerator()
    model = Tied()
    before = model.embedding.weight.detach().clone()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.device == model.scale.device == accelerator.device
    accelerator.backward(model(torch.tensor([1, 2], device=accelerator.device)).square().sum())
    optimizer.step()
    assert not torch.equal(model.embedding.weight.detach().cpu(), before)
    assert accelerator.unwrap_model(model) is model
    weights = accelerator.get_state_dict(model)
    assert weights["head.weight"] is weights["embedding.weight"]
    assert {value.device.type for value in weights.values()} == {"cpu"}


def test_a_fused_optimizer_runs(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator()
    model = Task().model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    accelerator.backward(model(torch.ones(2, 8, device=accelerator.device)).sum())
    optimizer.step()
    assert "AdamW(fused=True)" in caplog.text


def test_tensors_and_objects_in_one_process() -> None:
    accelerator = Accelerator()
    value = torch.arange(3, device=accelerator.device)
    assert accelerator.gather(value).tolist() == [0, 1, 2]
    assert accelerator.reduce(value, "sum").tolist() == [0, 1, 2]
    assert accelerator.gather_for_metrics(["a"], use_gather_object=True) == ["a"]
    accelerator.wait_for_everyone()
    accelerator.print("one process")


def test_the_loader_is_the_one_that_transformers_knows() -> None:
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    loader = Accelerator().prepare(Task().loader())
    assert isinstance(loader, MpDeviceLoader)
    assert type(loader) is MpDeviceLoaderWrapper
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (20, 240, 12)
    assert loader.dataloader.batch_size == 20
    loader.set_epoch(3)
    assert loader.iteration == 3


@pytest.mark.parametrize("backend", ["inductor", "torchxla_trace_once"])
def test_a_second_compiler_is_refused(backend: str) -> None:
    with pytest.raises(ValueError, match="XLA compiles every step in any case"):
        Accelerator(dynamo_backend=backend)
