"""One process that drives two XLA devices: the numbers of one plain process, and what lies on each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from tests.support.xla import Task, compilations, largest_difference, losses_by_hand, losses_of, run
from torch.utils.data import DataLoader

from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, TorchTensorParallelConfig

LAYOUTS: dict[str, dict[str, int]] = {
    "none": {},
    "replicas": {"dp_replicate_size": 2},
    "shards": {"dp_shard_size": 2},
}


def make(layout: str = "shards", **options: Any) -> Accelerator:
    sizes = LAYOUTS[layout]
    return Accelerator(parallelism_config=ParallelismConfig(**sizes) if sizes else None, **options)


def spread(tensor: torch.Tensor) -> str:
    """Return how torch_xla spreads a tensor over the devices; nothing is said of one that is whole on each."""
    return torch_xla._XLAC._get_xla_sharding_spec(tensor).replace("{replicated}", "")


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_equal_those_of_a_plain_process(layout: str, accumulation: int) -> None:
    task = Task(accumulation=accumulation, clip=0.5)
    accelerator = make(layout, gradient_accumulation_steps=accumulation)
    found = losses_of(task, accelerator)
    assert (accelerator.distributed_type, accelerator.num_processes) == (DistributedType.XLA, 1)
    assert accelerator.strategy.name == "xla-spmd"
    assert largest_difference(found, losses_by_hand(task)) < 2e-6


@pytest.mark.parametrize("layout", ["replicas", "shards"])
def test_bf16_is_near(layout: str) -> None:
    found = losses_of(Task(mixed_precision="bf16"), make(layout, mixed_precision="bf16"))
    assert 0 < largest_difference(found, losses_by_hand(Task())) < 0.02


@pytest.mark.parametrize(("accumulation", "graphs"), [(1, 2), (4, 4)])
def test_the_number_of_graphs_is_fixed(accumulation: int, graphs: int) -> None:
    task = Task(hidden=30 + 2 * accumulation, accumulation=accumulation, steps=24)
    with compilations() as found:
        losses_of(task, make(gradient_accumulation_steps=accumulation))
    assert found.count == graphs


def test_weights_moments_gradients_and_batches_are_spread(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = make(gradient_accumulation_steps=2)
    task = Task()
    model = task.model()
    model, optimizer, loader = accelerator.prepare(model, task.optimizer(model), task.loader())
    assert "2 XLA devices work on each batch together: 20 samples are 10 a device" in caplog.text
    outputs: list[str] = []
    model[0].register_forward_hook(lambda module, args, output: outputs.append(spread(output)))
    for number, (inputs, targets) in enumerate(loader):
        assert spread(inputs) == "{devices=[2,1]0,1}"
        assert spread(targets) == "{devices=[2]0,1}"
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        if number == 2:
            torch_xla.sync()
            assert spread(model[0].weight.grad) == "{devices=[2,1]0,1}"
            break
    assert outputs == ["{devices=[2,1]0,1}"] * 3
    state = optimizer.state[model[0].weight]
    assert spread(model[0].weight) == spread(state["exp_avg"]) == "{devices=[2,1]0,1}"
    # Three rows do not fill two devices evenly: the other dimension does.
    assert spread(model[2].weight) == "{devices=[1,2]0,1}"


def test_a_batch_that_the_devices_do_not_divide() -> None:
    task = Task(batch=17, steps=30)  # 240 samples: the last batch has 2
    assert largest_difference(losses_of(task, make()), losses_by_hand(task)) < 2e-6


def test_metrics_count_every_sample_once() -> None:
    accelerator = make()
    model = accelerator.prepare(Task().model())
    data = Task().data(30)
    loader = accelerator.prepare(DataLoader(data, batch_size=7, num_workers=1))
    found = []
    with torch.no_grad():
        for inputs, targets in loader:
            found.append(accelerator.gather_for_metrics((model(inputs).argmax(1), targets))[1])
    assert torch.cat(found).tolist() == data.tensors[1].tolist()


class Blocks(torch.nn.Module):
    tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        block = {"up": torch.nn.Linear(8, 16), "down": torch.nn.Linear(16, 8)}
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict(block)])
        self.head = torch.nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = inputs + layer["down"](torch.relu(layer["up"](inputs)))
        return self.head(inputs)


class SplitTask(Task):
    def model(self) -> torch.nn.Module:
        return Blocks()


@pytest.mark.parametrize("given", [True, False])
def test_layers_are_split_by_a_plan(given: bool) -> None:
    handler = TorchTensorParallelConfig(plan=Blocks.tp_plan) if given else None
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
    task = SplitTask()
    model = task.model()
    optimizer = task.optimizer(model)
    objects = accelerator.prepare(model, optimizer, task.scheduler(optimizer), task.loader())
    layer = objects[0].layers[0]
    assert spread(layer["up"].weight) == "{devices=[2,1]0,1}"
    assert spread(layer["up"].bias) == "{devices=[2]0,1}"
    assert spread(layer["down"].weight) == "{devices=[1,2]0,1}"
    assert spread(layer["down"].bias) == ""
    assert largest_difference(run(task, accelerator, *objects), losses_by_hand(task)) < 2e-6


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"layers.*.up": "diagonal"}, "'diagonal', which is not known for XLA"),
        ({"layer.*.up": "colwise"}, "the model has no such module"),
        (None, "has no tp_plan"),
    ],
)
def test_plans_that_cannot_work(plan: Any, reason: str) -> None:
    handler = TorchTensorParallelConfig(plan=plan)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler))
    model = Blocks() if plan else Task().model()
    with pytest.raises(ValueError, match=reason):
        accelerator.prepare(model)


@pytest.mark.parametrize("sizes", [{"dp_shard_size": 3}, {"dp_shard_size": 2, "tp_size": 2}])
def test_a_mesh_that_does_not_fit_the_devices(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"calls for . XLA devices, but there are 2"):
        Accelerator(parallelism_config=ParallelismConfig(**sizes))


@pytest.mark.parametrize("layout", ["shards", "replicas"])
def test_a_checkpoint_resumes_exactly_and_spread(tmp_path: Path, layout: str) -> None:
    task = Task(steps=12, accumulation=5)
    accelerator = make(layout, gradient_accumulation_steps=5)
    model = task.model()
    optimizer = task.optimizer(model)
    objects = accelerator.prepare(model, optimizer, task.scheduler(optimizer), task.loader())
    run(task, accelerator, *objects)
    accelerator.save_state(tmp_path / "state")
    expected = run(task, accelerator, *objects)
    AcceleratorState._reset_state(True)
    accelerator = make(layout, gradient_accumulation_steps=5)
    model = task.model()
    optimizer = task.optimizer(model)
    objects = accelerator.prepare(model, optimizer, task.scheduler(optimizer), task.loader())
    accelerator.load_state(tmp_path / "state")
    weight = objects[0][0].weight
    wanted = "{devices=[2,1]0,1}" if layout == "shards" else ""
    assert spread(weight) == wanted
    if layout == "shards":
        assert spread(objects[1].state[weight]["exp_avg"]) == wanted
    assert run(task, accelerator, *objects) == expected
    weights = accelerator.get_state_dict(objects[0])
    assert weights["0.weight"].device.type == "cpu"
    assert weights["0.weight"].shape == (16, 8)
