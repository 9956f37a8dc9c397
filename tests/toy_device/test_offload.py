"""Models that do not fit on a toy device run from the CPU, the disk and several devices, with the numbers of the CPU."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.toy_device import on_toy
from torch import nn
from torch.nn import functional

from accelerate import (
    Accelerator,
    PartialState,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.hooks.offloaded import get_state_dict_offloaded_model
from accelerate.utils import get_balanced_memory, get_max_memory, release_memory

WIDTH = 64
NUM_BLOCKS = 8
KIB = 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.relu(self.up(self.norm(x)))) + self.shift


class Net(nn.Module):
    """Blocks of 131 KiB each, and an embedding that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(5)


def made() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def run(model: nn.Module, device: str = "cpu") -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(TOKENS.to(device))
    return output


def assert_same(model: nn.Module, times: int = 2, **kwargs: Any) -> None:
    expected = run(made())
    for _ in range(times):
        assert torch.equal(run(model, **kwargs).cpu(), expected)


def memory_left(device: int = 0) -> int:
    """Return what is still taken on a device after models were deleted."""
    release_memory()
    return torch.accelerator.memory_allocated(device)


def checkpoint(folder: Path) -> Path:
    state = {name: value for name, value in made().state_dict().items() if name != "head.weight"}
    save_file(state, folder / "model.safetensors")
    return folder


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


EMBEDDING = made().embed.weight.nbytes
SIZE = sum(tensor.nbytes for tensor in made().state_dict().values()) - EMBEDDING
BLOCK = sum(tensor.nbytes for tensor in made().blocks[0].state_dict().values())
BUFFER = made().blocks[0].shift.nbytes
ACTIVATIONS = 64 * KIB


@on_toy(memory=SIZE // 2)
def test_a_model_that_does_not_fit_runs_from_the_cpu() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        made().to("toy")
    release_memory()
    assert_same(cpu_offload(made()))
    assert torch.accelerator.max_memory_allocated() <= SIZE // 2
    assert memory_left() == 0


@on_toy(memory=SIZE // 2)
def test_a_model_that_does_not_fit_runs_from_the_disk(tmp_path: Path) -> None:
    model = disk_offload(made(), tmp_path / "folder")
    assert_same(model)
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name].cpu(), value) for name, value in made().state_dict().items())
    remove_hook_from_submodules(model)
    del model
    assert memory_left() == 0


@pytest.mark.parametrize("source", ["cpu", "disk"])
@on_toy(memory=64 * 1024 * KIB)
def test_weights_are_read_ahead_inside_the_budget(source: str, tmp_path: Path) -> None:
    budget = 3 * BLOCK
    model = load_checkpoint_and_dispatch(
        empty(),
        checkpoint(tmp_path),
        {"": source},
        offload_folder=tmp_path / "o",
        offload_memory=budget,
        force_hooks=True,
    )
    # Hooks run a model that is not on an accelerator where it lies: on the CPU.
    assert run(model).device.type == "cpu"
    places: dict[str, str | int] = {"embed": 0, "head": 0, "blocks": source}
    model = load_checkpoint_and_dispatch(
        empty(), tmp_path, places, offload_folder=tmp_path / "o", offload_memory=budget
    )
    held = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    assert_same(model, times=3)
    assert torch.accelerator.max_memory_allocated() <= held + budget + ACTIVATIONS
    assert {parameter.device.type for block in model.blocks for parameter in block.parameters()} == {"meta"}
    del model
    assert memory_left() == 0


@pytest.mark.parametrize("source", ["cpu", "disk"])
@on_toy(devices=2, memory=4 * BLOCK)
def test_two_devices_that_do_not_hold_a_model_run_it_inside_the_budget(source: str, tmp_path: Path) -> None:
    assert 2 * 4 * BLOCK < SIZE + 2 * ACTIVATIONS
    places: dict[str, Any] = {"embed": 0, "head": 0, "blocks": source, "blocks.0": 0, "blocks.5": 1, "blocks.6": 1}
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint(tmp_path), places, offload_folder=tmp_path / "o", offload_memory=2 * BLOCK
    )
    held = [torch.accelerator.memory_allocated(index) for index in range(2)]
    assert held == [BLOCK + EMBEDDING + 5 * BUFFER, 2 * BLOCK]
    for index in range(2):
        torch.accelerator.reset_peak_memory_stats(index)
    assert_same(model, times=3)
    peaks = [torch.accelerator.max_memory_allocated(index) for index in range(2)]
    assert held[0] + BLOCK < peaks[0] <= held[0] + 2 * BLOCK + ACTIVATIONS  # weights are brought to the first
    assert peaks[1] <= held[1] + ACTIVATIONS
    del model
    assert [memory_left(index) for index in range(2)] == [0, 0]


@on_toy(processes=2, memory=SIZE // 2)
def test_each_rank_runs_its_copy_from_the_disk_in_its_own_device(tmp_path: Path) -> None:
    state = PartialState()
    with pytest.raises(torch.OutOfMemoryError):
        made().to(state.device)
    release_memory()
    model = disk_offload(made(), tmp_path / str(state.process_index), state.device, offload_memory=2 * BLOCK)
    torch.accelerator.reset_peak_memory_stats(state.device)
    assert_same(model)
    assert 0 < torch.accelerator.max_memory_allocated(state.device) <= 2 * BLOCK + ACTIVATIONS
    assert torch.accelerator.max_memory_allocated(1 - state.process_index) == 0


def spread(*counts: tuple[int | str, int]) -> dict[str, int | str]:
    """Return the map that gives each place as many blocks, in their order, and the embedding to the first."""
    blocks = [place for place, count in counts for _ in range(count)]
    return {"embed": 0, "head": 0} | {f"blocks.{index}": place for index, place in enumerate(blocks)}


@pytest.mark.parametrize("devices", [1, 2])
@on_toy(memory=3 * BLOCK + 128 * KIB)
def test_a_plan_fits_the_memory_that_is_free(devices: int, tmp_path: Path) -> None:
    free, last = get_max_memory(), devices - 1
    assert list(free) == [*range(devices), "cpu"]
    assert [free[index] for index in range(devices)] == [3 * BLOCK + 128 * KIB] * devices
    taken = torch.empty(1000, dtype=torch.uint8, device=f"toy:{last}")
    assert get_max_memory()[last] == free[last] - 1000
    del taken
    model = made()
    # Blocks of the CPU run on the first device, which keeps room for one of them.
    expected = spread((0, 2), ("cpu", 6)) if devices == 1 else spread((0, 2), (1, 3), ("cpu", 3))
    device_map = infer_auto_device_map(model, no_split_module_classes=["Block"])
    assert device_map == expected
    assert_same(dispatch_model(model, device_map))
    del model
    release_memory()
    loaded = load_checkpoint_and_dispatch(
        empty(), checkpoint(tmp_path), "auto", no_split_module_classes=["Block"], offload_folder=tmp_path / "o"
    )
    assert loaded.hf_device_map == expected
    assert_same(loaded)


@on_toy(devices=2)
def test_a_model_that_fits_is_shared_evenly() -> None:
    model = made()
    balanced = get_balanced_memory(model, {0: 2 * SIZE, 1: 2 * SIZE}, no_split_module_classes=["Block"])
    device_map = infer_auto_device_map(model, balanced, no_split_module_classes=["Block"])
    assert device_map == spread((0, 4), (1, 4))
    assert_same(dispatch_model(model, device_map))
    assert [torch.accelerator.memory_allocated(index) for index in range(2)] == [4 * BLOCK + EMBEDDING, 4 * BLOCK]


@pytest.mark.parametrize("offload_buffers", [False, True])
@on_toy(devices=2)
def test_a_model_runs_over_two_devices_the_cpu_and_the_disk(offload_buffers: bool, tmp_path: Path) -> None:
    device_map: dict[str, Any] = {"embed": 0, "head": 0}
    device_map |= {f"blocks.{index}": (0, 1, "cpu", "disk")[index % 4] for index in range(NUM_BLOCKS)}
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint(tmp_path), device_map, offload_folder=tmp_path / "o", offload_buffers=offload_buffers
    )
    assert (model.blocks[0].up.weight.device, model.blocks[1].up.weight.device) == (
        torch.device("toy:0"),
        torch.device("toy:1"),
    )
    assert model.head.weight is model.embed.weight
    assert_same(model, times=3)
    output = run(model)
    assert output.device.type == "cpu"  # where the input came from
    with pytest.raises(RuntimeError, match="offloaded"):
        model.to("toy:1")
    again = dispatch_model(model, {"": 1})
    assert_same(again, device="toy:1")
    assert {parameter.device for parameter in again.parameters()} == {torch.device("toy:1")}


@on_toy()
def test_weights_of_inputs_train_through_offloaded_layers(tmp_path: Path) -> None:
    def gradient(model: Any, device: str) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2 * WIDTH, device=device).reshape(2, WIDTH).requires_grad_()
        model.blocks[2](model.blocks[1](x)).square().sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    model = load_checkpoint_and_dispatch(
        empty(),
        checkpoint(tmp_path),
        {"embed": 0, "head": 0, "blocks": "disk"},
        offload_folder=tmp_path / "o",
        offload_memory=BLOCK,
    )
    expected = gradient(made(), "cpu")
    for _ in range(2):
        torch.testing.assert_close(gradient(model, "toy:0"), expected)


@on_toy()
def test_models_of_a_pipeline_make_room_for_each_other() -> None:
    torch.toy.set_memory_limit(0, SIZE + SIZE // 2)
    first, first_hook = cpu_offload_with_hook(made(), "toy:0")
    second, second_hook = cpu_offload_with_hook(made(), "toy:0", prev_module_hook=first_hook)
    expected = run(made())
    for _ in range(2):
        assert torch.equal(run(first).cpu(), expected)
        assert first.head.weight is first.embed.weight
        assert first.head.weight.device == torch.device("toy:0")
        assert torch.equal(run(second).cpu(), expected)  # both do not fit
        assert first.head.weight.device.type == "cpu"
        assert first.head.weight is first.embed.weight
        second_hook.offload()
    assert memory_left() == 0


@on_toy(devices=2)
def test_a_hook_brings_the_weights_of_one_layer() -> None:
    layer = nn.Linear(4, 3)
    expected = layer(torch.ones(2, 4))
    weights = {name: value.clone() for name, value in layer.state_dict().items()}
    add_hook_to_module(layer, AlignDevicesHook("toy:1", offload=True, weights_map=weights, io_same_device=True))
    start = torch.accelerator.memory_allocated(1)
    for _ in range(2):
        found = layer(torch.ones(2, 4))
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, expected)
        assert layer.weight.device.type == "meta"
    del found
    release_memory()
    assert torch.accelerator.memory_allocated(1) == start


@on_toy(devices=2)
def test_models_are_made_on_a_device() -> None:
    with init_on_device(torch.device("toy:1"), include_buffers=True):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert {value.device for value in model.state_dict().values()} == {torch.device("toy:1")}
    single = dispatch_model(made(), {"": "toy:1"})
    assert single.head.weight is single.embed.weight
    assert_same(single, device="toy:1")


@on_toy(devices=2)
def test_a_dispatched_model_is_saved_whole(tmp_path: Path) -> None:
    accelerator = Accelerator()
    device_map: dict[str, Any] = {"embed": 0, "head": 0, "blocks": "cpu"}
    device_map |= {"blocks.1": 1, "blocks.2": "disk"}
    model = dispatch_model(made(), device_map, offload_dir=tmp_path / "o")
    accelerator.save_model(model, tmp_path / "saved", max_shard_size="300KB")
    again = load_checkpoint_and_dispatch(empty(), tmp_path / "saved", {"": 0})
    assert_same(again, device="toy:0")
    copied = copy.deepcopy(again)
    assert_same(copied, device="toy:0")


class Breaks(ModelHook):
    """Fail in the middle of a pass, once."""

    def __init__(self) -> None:
        self.has_failed = False

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.has_failed:
            self.has_failed = True
            torch.empty(2**40, device="toy:0")
        return args, kwargs


@on_toy()
def test_a_pass_that_runs_out_of_memory_leaves_nothing_and_the_next_one_runs(tmp_path: Path) -> None:
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint(tmp_path), {"": "disk"}, offload_folder=tmp_path / "o", offload_memory=2 * BLOCK
    )
    dispatched = dispatch_model(made(), {"embed": 0, "head": 0, "blocks": "cpu"}, offload_memory=2 * BLOCK)
    held = torch.accelerator.memory_allocated()
    assert held == EMBEDDING + NUM_BLOCKS * BUFFER
    for index in (4, 2):
        add_hook_to_module(dispatched.blocks[index].down, Breaks(), append=True)
        with pytest.raises(torch.OutOfMemoryError):
            run(dispatched)
        release_memory()
        # Weights may stay for the next pass.
        assert held <= torch.accelerator.memory_allocated() <= held + 2 * BLOCK
        if index == 4:
            assert_same(dispatched)
            assert_same(model)
    remove_hook_from_submodules(dispatched)
    del model
    assert memory_left() == EMBEDDING  # nothing of the pass that failed last
    del dispatched
    assert memory_left() == 0


@on_toy()
def test_threads_that_call_one_model_get_their_numbers(tmp_path: Path) -> None:
    places: dict[str, Any] = {"embed": 0, "head": 0, "blocks": "disk"}
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint(tmp_path), places, offload_folder=tmp_path / "o", offload_memory=3 * BLOCK
    )
    expected, wrong = run(made()), list[object]()

    def work() -> None:
        try:
            for _ in range(4):
                assert torch.equal(run(model), expected)
        except BaseException as failure:
            wrong.append(failure)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@on_toy(devices=2)
def test_weights_are_loaded_in_another_format(file: str, tmp_path: Path) -> None:
    state = {name: value for name, value in made().state_dict().items() if name != "head.weight"}
    torch.save(state, tmp_path / file) if file.endswith(".bin") else save_file(state, tmp_path / file)
    places: dict[str, Any] = {"embed": 0, "head": 0, "blocks": 1} | {"blocks.1": "cpu", "blocks.2": "disk"}
    expected = run(made().to(torch.bfloat16))
    model = load_checkpoint_and_dispatch(empty(), tmp_path, places, offload_folder=tmp_path / "o", dtype=torch.bfloat16)
    found = run(model)
    assert (model.blocks[3].up.weight.device, model.blocks[3].up.weight.dtype) == (
        torch.device("toy:1"),
        torch.bfloat16,
    )
    assert torch.equal(found, expected)


@on_toy(processes=2)
def test_one_rank_reads_a_checkpoint_for_all(tmp_path: Path) -> None:
    state = PartialState()
    # The other rank has no file that it could read.
    folder = checkpoint(tmp_path) if state.is_main_process else tmp_path / "nowhere"
    model = empty()
    load_checkpoint_in_model(model, folder, {"": state.device}, broadcast_from_rank0=True)
    assert {parameter.device for parameter in model.parameters()} == {state.device}
    found, expected = model.state_dict(), made().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), value) for name, value in expected.items())
