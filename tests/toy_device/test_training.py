"""A training loop on one and on two toy devices gives the numbers of the CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.launching import launch_command, launch_environment
from tests.support.toy_device import environment, on_the_cpu, on_toy
from tests.support.training import (
    Layout,
    Outcome,
    Recipe,
    assert_same_outcome,
    fresh_accelerator,
    make_data,
    make_model,
    train,
    train_plain,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate import Accelerator, PartialState
from accelerate.config.env import patch_environment
from accelerate.devices import registry
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, FullyShardedDataParallelPlugin

RECIPES = {
    "sgd": Recipe("sgd"),
    "adamw, clipped": Recipe("adamw", clip=0.1),
    "adamw, shuffled": Recipe("adamw", shuffle=True),
}
LAYOUTS = {"whole batches": Layout(12), "accumulated": Layout(4, accumulation=3, evaluates=True)}


def on_host(outcome: Outcome) -> Outcome:
    weights = {name: value.cpu() for name, value in outcome.weights.items()}
    return Outcome(weights, outcome.losses, outcome.rates)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@on_toy()
def test_one_device_trains_bit_for_bit_as_the_cpu(recipe: Recipe, layout: Layout) -> None:
    found = train(recipe, layout)
    assert {value.device for value in found.weights.values()} == {torch.device("toy:0")}
    with on_the_cpu():
        expected = train(recipe, layout)
    assert {value.device.type for value in expected.weights.values()} == {"cpu"}
    assert_same_outcome(on_host(found), expected, tolerance=0)


@on_toy(processes=2)
def test_two_devices_train_as_one_process() -> None:
    for recipe in RECIPES.values():
        for layout in (
            Layout(6),
            Layout(2, accumulation=3, evaluates=True),
            Layout(6, loaders={"dispatch_batches": True}),
        ):
            found = train(recipe, layout)
            assert {value.device for value in found.weights.values()} == {
                torch.device("toy", PartialState().process_index)
            }
            assert_same_outcome(on_host(found), train_plain(recipe))


@on_toy(processes=2)
def test_each_rank_has_its_own_device() -> None:
    accelerator = Accelerator()
    own = torch.device("toy", accelerator.process_index)
    assert accelerator.device == own
    assert torch.accelerator.current_device_index() == own.index
    assert (accelerator.state.backend, dist.get_backend()) == ("toy", "toy")
    assert accelerator.distributed_type is DistributedType.MULTI_GPU
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert isinstance(model, DistributedDataParallel)
    assert model.device_ids == [own.index]
    accelerator.backward(model(torch.ones(2, 5, dtype=torch.float64, device=own)).sum())
    optimizer.step()
    held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    held += [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert {tensor.device for tensor in held} == {own}
    accelerator.wait_for_everyone()


@on_toy(devices=3)
def test_the_device_is_found_and_said_why() -> None:
    backend = registry.default()
    assert backend.reason == "torch.accelerator reports 'toy'"
    assert (backend.value.is_available(), backend.value.device_count()) == (True, 3)
    accelerator = Accelerator()
    assert accelerator.device == torch.device("toy")
    assert accelerator.distributed_type is DistributedType.NO
    assert Accelerator(cpu=False).prepare(torch.nn.Linear(2, 2)).weight.device == torch.device("toy:0")


@on_toy(devices=3)
def test_the_environment_chooses_a_device() -> None:
    with patch_environment(accelerate_torch_device="toy:2"):
        accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    assert {parameter.device for parameter in model.parameters()} == {accelerator.device} == {torch.device("toy:2")}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embed(tokens))
        return logits


def tied_loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(tokens), tokens.flip(0))


def train_tied_plain() -> torch.Tensor:
    torch.manual_seed(0)
    model, tokens = Tied(), torch.arange(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        tied_loss(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.embed.weight.detach()


def check_tied() -> None:
    """Train weights that have two names; momentum and clipping see them once."""
    torch.manual_seed(0)
    accelerator, model = Accelerator(), Tied()
    model.embed.weight.mark = "kept"
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    own = accelerator.unwrap_model(model)
    assert own.head.weight is own.embed.weight
    assert own.embed.weight.mark == "kept"
    tokens = torch.arange(6, device=accelerator.device)
    for _ in range(3):
        accelerator.backward(tied_loss(model, tokens))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(own.embed.weight.detach().cpu(), train_tied_plain())


@on_toy()
def test_tied_weights_stay_tied() -> None:
    check_tied()


@on_toy(processes=2)
def test_tied_weights_stay_tied_on_two_devices() -> None:
    check_tied()


@on_toy(processes=2)
def test_a_group_of_gloo_serves_devices_that_it_does_not_know() -> None:
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    rank = accelerator.process_index
    assert accelerator.device == torch.device("toy", rank)
    accelerator.wait_for_everyone()
    gathered = accelerator.gather(torch.tensor([rank + 1.0], device=accelerator.device))
    assert (gathered.device, gathered.tolist()) == (accelerator.device, [1.0, 2.0])


@on_toy(processes=2)
def test_local_sgd_and_uneven_inputs() -> None:
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for _ in range(2):
            inputs = torch.full((1, 1), 1.0 + accelerator.process_index, device=accelerator.device)
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    assert model.module.weight.item() == pytest.approx(-0.3)
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(1 + accelerator.process_index):
            model(torch.ones(1, 1, device=accelerator.device)).sum().backward()
    assert accelerator.reduce(torch.ones(1, device=accelerator.device)).item() == 2.0


SHARDED_STEPS = 4


def train_sharded(plugin: FullyShardedDataParallelPlugin, folder: Path | None = None) -> dict[str, torch.Tensor]:
    accelerator = fresh_accelerator(fsdp_plugin=plugin)
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(make_data(8 * SHARDED_STEPS, torch.float32), batch_size=8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, (inputs, targets) in enumerate(loader):
        if folder is not None and number == 2:
            accelerator.save_state(folder)
            # All that the second half goes on from is lost, and comes back from the files.
            for parameter in model.parameters():
                parameter.data.zero_()
            for state in optimizer.state.values():
                assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
                for value in state.values():
                    value.fill_(7.0)
            accelerator.load_state(folder)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}


def train_sharded_plain() -> dict[str, torch.Tensor]:
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for inputs, targets in DataLoader(make_data(8 * SHARDED_STEPS, torch.float32), batch_size=8):
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def check_sharded(folder: Path, **options: Any) -> None:
    expected = train_sharded_plain()
    for checkpoint in (None, folder):
        found = train_sharded(FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP", **options), checkpoint)
        if PartialState().is_main_process:
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        else:
            assert found == {} or set(found) == set(expected)


@pytest.mark.parametrize(
    ("version", "on_host"), [(1, False), (2, False), (2, True)], ids=["fsdp1", "fsdp2", "fsdp2 on the host"]
)
@pytest.mark.parametrize("files", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@on_toy(processes=2)
def test_fsdp_trains_saves_and_loads(files: str, version: int, on_host: bool, tmp_path: Path) -> None:
    check_sharded(tmp_path / "checkpoint", fsdp_version=version, cpu_offload=on_host, state_dict_type=files)


@on_toy()
def test_fsdp_on_one_device_has_nothing_to_share_and_trains(tmp_path: Path) -> None:
    for version in (1, 2):
        check_sharded(tmp_path / str(version), fsdp_version=version)
        assert Accelerator().distributed_type is DistributedType.NO


@pytest.mark.parametrize("hook", ["fp16", "power_sgd", "batched_power_sgd"])
@on_toy(processes=2)
def test_gradients_travel_in_a_smaller_form(hook: str) -> None:
    accelerator = fresh_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])
    model = torch.nn.Linear(8, 8)
    torch.nn.init.zeros_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    inputs = torch.ones(1, 8, device=accelerator.device) * (1 + 2 * accelerator.process_index)
    for _ in range(2):
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
    # The gradients have rank 1, which PowerSGD keeps.
    torch.testing.assert_close(model.module.weight.detach().cpu(), torch.full((8, 8), -4.0), rtol=1e-3, atol=1e-3)


SCRIPT = """
import json
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.arange(24.0).reshape(8, 3) / 24
loader = torch.utils.data.DataLoader(rows, batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
weights = [parameter.flatten().tolist() for parameter in accelerator.unwrap_model(model).parameters()]
facts = {"device": str(accelerator.device), "weights": weights}
with open(f"{sys.argv[1]}/{accelerator.process_index}.json", "w") as file:
    json.dump(facts, file)
"""


def launched(folder: Path, *options: str, env: dict[str, str]) -> list[dict[str, Any]]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = launch_command(*options, str(folder / "train.py"), str(folder))
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_a_launch_runs_a_plain_script_on_two_devices(tmp_path: Path) -> None:
    with_device = launch_environment({"PYTHONPATH": environment()["PYTHONPATH"]})
    # The CPU is kept where it is asked for.
    (expected,) = launched(tmp_path / "one", "--cpu", "--num_processes", "1", env=with_device)
    assert expected["device"] == "cpu"
    found = launched(tmp_path / "two", "--num_processes", "2", env=with_device)
    assert [facts["device"] for facts in found] == ["toy:0", "toy:1"]
    for facts in found:
        for values, wanted in zip(facts["weights"], expected["weights"], strict=True):
            assert values == pytest.approx(wanted, rel=1e-5)
