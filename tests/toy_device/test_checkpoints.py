"""Checkpoints of runs on the toy device: exact resume, other devices, and saves beside training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.toy_device import on_the_cpu, on_toy
from tests.support.training import FEATURES, fresh_accelerator, make_data
from torch.utils.data import DataLoader

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate.checkpointing import snapshot
from accelerate.devices.copy_lane import CopyLane
from accelerate.runtime.memory import release_memory
from accelerate.utils import broadcast_object_list, set_seed


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 16), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)
    )


class Run:
    """A run that draws numbers on the device, from dropout and from noise on its inputs."""

    def __init__(self, **options: Any) -> None:
        self.accelerator = fresh_accelerator(**options)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        loader = DataLoader(make_data(32, torch.float32), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.batches = self._epochs()
        set_seed(3, device_specific=True)

    def _epochs(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for inputs, targets in islice(self.batches, steps):
            noise = torch.randn(inputs.shape, device=inputs.device)
            loss = torch.nn.functional.mse_loss(self.model(inputs + 0.1 * noise), targets)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(folder)
        self.batches = self._epochs()

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.accelerator.unwrap_model(self.model).state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items()}


def of_the_first_rank(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a checkpoint of replicas holds, whose running statistics differ between two passes."""
    found: dict[str, torch.Tensor] = broadcast_object_list([weights])[0]
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def places(run: Run) -> set[tuple[str, torch.device]]:
    return {(name, value.device) for state in run.optimizer.state.values() for name, value in state.items()}


def check_exact_resume(folder: Path, **options: Any) -> None:
    run = Run(**options)
    run.train(5)
    run.accelerator.save_state(folder)
    # Every device of the process goes on where it was, not only the one that trains.
    before = [state.clone() for state in torch.toy.get_rng_state_all()]
    losses, weights = run.train(6), run.weights()
    again = Run(**options)
    again.train(1)
    again.load(folder)
    for found, expected in zip(torch.toy.get_rng_state_all(), before, strict=True):
        assert torch.equal(found, expected)
    assert again.train(6) == losses
    assert_equal(again.weights(), weights)
    assert places(again) == places(run)


@pytest.mark.parametrize(("precision", "devices"), [("no", 1), ("no", 2), ("bf16", 1), ("fp16", 1)])
@on_toy()
def test_a_run_goes_on_exactly(precision: str, devices: int, tmp_path: Path) -> None:
    assert torch.toy.device_count() == devices
    check_exact_resume(tmp_path / "checkpoint", mixed_precision=precision)


@pytest.mark.filterwarnings("ignore:This schedule advances")
@on_toy(processes=2)
def test_a_run_on_two_devices_goes_on_exactly(tmp_path: Path) -> None:
    for precision in ("no", "bf16"):
        check_exact_resume(tmp_path / precision, mixed_precision=precision)


@on_toy()
def saves_random_states(devices: int, folder: Path) -> None:
    accelerator = Accelerator()
    for index in range(devices):
        torch.rand(3 + index, device=f"toy:{index}")
    accelerator.save_state(folder / "checkpoint")
    torch.save(torch.rand(4, device="toy:0").cpu(), folder / "drawn.pt")


@on_toy()
def loads_random_states(devices: int, folder: Path) -> None:
    accelerator = Accelerator()
    torch.toy.manual_seed_all(99)
    before = torch.toy.get_rng_state_all()
    accelerator.load_state(folder / "checkpoint")
    # Devices that the file says nothing of stay as they are.
    after = torch.toy.get_rng_state_all()
    assert len(after) == devices
    assert all(torch.equal(after[index], before[index]) for index in range(1, devices))
    assert torch.equal(torch.rand(4, device="toy:0").cpu(), torch.load(folder / "drawn.pt", weights_only=True))


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2), (3, 2)])
def test_random_states_fit_another_number_of_devices(saved: int, loaded: int, tmp_path: Path) -> None:
    saves_random_states(devices=saved, folder=tmp_path)
    loads_random_states(devices=loaded, folder=tmp_path)


@pytest.mark.filterwarnings("ignore:This schedule advances")
@pytest.mark.parametrize("processes", [1, 2])
@on_toy()
def test_a_checkpoint_goes_to_the_cpu_and_back(processes: int, tmp_path: Path) -> None:
    run = Run()
    assert (run.accelerator.device.type, run.accelerator.num_processes) == ("toy", processes)
    run.train(4)
    run.accelerator.save_state(tmp_path / "toy")
    weights = of_the_first_rank(run.weights())
    with on_the_cpu():
        on_cpu = Run()
        on_cpu.load(tmp_path / "toy")
        assert_equal(on_cpu.weights(), weights)
        assert {parameter.device.type for parameter in on_cpu.model.parameters()} == {"cpu"}
        assert on_cpu.accelerator.num_processes == processes
        on_cpu.train(3)
        on_cpu.accelerator.save_state(tmp_path / "cpu")
        weights = of_the_first_rank(on_cpu.weights())
    back = Run()
    back.load(tmp_path / "cpu")
    assert_equal(back.weights(), weights)
    own = torch.device("toy", back.accelerator.process_index)
    assert {parameter.device for parameter in back.model.parameters()} == {own}
    back.train(1)


@on_toy(devices=2)
def test_files_name_no_device_that_loading_would_need(tmp_path: Path) -> None:
    run = Run()
    run.train(2)
    run.accelerator.save_state(tmp_path / "checkpoint")
    run.accelerator.save_model(run.model, tmp_path / "weights")
    assert_equal(load_file(tmp_path / "weights" / "model.safetensors"), run.weights())
    model = make_model()
    load_checkpoint_in_model(model, tmp_path / "weights", device_map={"": 1})
    assert {value.device for value in model.state_dict().values()} == {torch.device("toy:1")}
    assert_equal({name: value.cpu() for name, value in model.state_dict().items()}, run.weights())


@pytest.mark.filterwarnings("ignore:This schedule advances")
@pytest.mark.parametrize("processes", [1, 2])
@on_toy()
def test_a_save_beside_training_holds_the_values_of_its_moment(processes: int, tmp_path: Path) -> None:
    run = Run()
    assert (run.accelerator.device.type, run.accelerator.num_processes) == ("toy", processes)
    for number in range(3):  # buffers are lent again
        run.train(2)
        weights = of_the_first_rank(run.weights())
        moments = [value.detach().cpu().clone() for state in run.optimizer.state.values() for value in state.values()]
        run.accelerator.save_state(tmp_path / str(number), blocking=False)
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.0)  # at once, by work on the device
        run.train(2)
        run.accelerator.wait_for_save()
        again = Run()
        again.load(tmp_path / str(number))
        assert_equal(again.weights(), weights)
        loaded = [value.cpu() for state in again.optimizer.state.values() for value in state.values()]
        for found, expected in zip(loaded, moments, strict=True):
            assert torch.equal(found, expected)
        run.load(tmp_path / str(number))


@on_toy()
def test_a_save_beside_training_gives_its_device_memory_back(tmp_path: Path) -> None:
    run = Run()
    run.train(2)
    allocated = torch.accelerator.memory_allocated()
    run.accelerator.save_state(tmp_path / "one", blocking=False)
    run.accelerator.wait_for_save()
    assert torch.accelerator.memory_allocated() == allocated


@on_toy(devices=2)
def test_copies_to_the_host_are_complete_when_they_are_handed_out() -> None:
    Accelerator()
    tensor = torch.arange(8.0, device="toy:1")
    state = {"whole": tensor, "part": tensor[2:5], "strided": tensor[::2], "other": torch.ones(3, device="toy:0")}
    copied = snapshot.host_copy(state)
    tensor.fill_(0.0)
    assert copied["whole"].tolist() == list(range(8))
    assert (copied["part"].tolist(), copied["strided"].tolist()) == ([2.0, 3.0, 4.0], [0.0, 2.0, 4.0, 6.0])
    assert copied["whole"].is_pinned()
    assert torch.toy.num_waiting(0) == torch.toy.num_waiting(1) == 0


@on_toy()
def test_a_thread_copies_what_the_device_was_still_writing() -> None:
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(model(torch.ones(1, 4, device=accelerator.device)).sum())
    optimizer.step()
    source = torch.full((4, 4), 7.0).pin_memory()
    lane = torch.Stream(device="toy:0")
    momentum = next(iter(optimizer.state.values()))["momentum_buffer"]
    with lane:  # the last thing that is queued before the save, on the stream of this thread
        momentum.copy_(source, non_blocking=True)
        deferred = snapshot.copy_before_step(optimizer, optimizer.state_dict(), "the optimizer")
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(deferred.get()))
    thread.start()
    thread.join()
    assert found[0]["state"][0]["momentum_buffer"].tolist() == source.tolist()


@on_toy(devices=2)
def test_a_lane_brings_tensors_beside_other_work() -> None:
    start = torch.accelerator.memory_allocated(1)
    lane = CopyLane(torch.device("toy:1"))
    sent = [torch.full((3, 5), float(number)) for number in range(6)]
    arrivals = [lane.send(tensor, dtype) for tensor in sent for dtype in (torch.float32, torch.bfloat16)]
    for number, arrival in enumerate(arrivals):
        tensor = arrival.take()
        assert tensor.device == torch.device("toy:1")
        assert (tensor.float() == number // 2).all()
    del arrivals, arrival, tensor
    release_memory()
    assert torch.accelerator.memory_allocated(1) == start
