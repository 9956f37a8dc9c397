"""A model from the CPU, from the disk and from both gives the numbers of the undispatched one, bit for bit."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from accelerate.hooks.offloaded import get_state_dict_offloaded_model

WIDTH = 300  # matrices of 360 kB that are copied where a file does not align them, and one that is mapped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("shift", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x)))) + self.shift


class Net(nn.Module):
    """An embedding that is tied to the head, a block that is used twice, and one that not every input meets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.seldom = Block()
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        if tokens[0] % 2:
            x = self.seldom(x)
        return self.head(x)


INPUTS = [torch.arange(start, start + 5) for start in (0, 1, 2, 4, 5)]
MAPS = {
    "cpu": {"": "cpu"},
    "disk": {"": "disk"},
    "mixed": {
        "embed": "cpu",
        "head": "cpu",
        "blocks.0": "disk",
        "blocks.1": "cpu",
        "blocks.2": "disk",
        "seldom": "disk",
    },
    "torn ties": {"embed": "disk", "head": "cpu", "blocks": "disk", "seldom": "cpu"},
}


def made(training: bool = False) -> Net:
    torch.manual_seed(0)
    return Net().train(training)


def from_file(tmp_path: Path, device_map: dict[str, str], **kwargs: Any) -> Net:
    state = {name: value for name, value in made().state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    with init_empty_weights():
        model = Net().eval()
    return load_checkpoint_and_dispatch(
        model, tmp_path, device_map, offload_folder=tmp_path / "o", strict=True, **kwargs
    )


def outputs(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(tokens) for tokens in INPUTS]


def assert_equal(model: nn.Module, plain: list[torch.Tensor]) -> None:
    for found, expected in zip(outputs(model), plain, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS.keys())
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("memory", [None, "3MB"])
def test_every_map_gives_the_same_numbers(
    device_map: dict[str, str], offload_buffers: bool, memory: str | None, tmp_path: Path
) -> None:
    plain, model = (
        outputs(made()),
        from_file(tmp_path, device_map, offload_buffers=offload_buffers, offload_memory=memory),
    )
    for _ in range(2):
        assert_equal(model, plain)
    with torch.inference_mode():
        assert torch.equal(model(INPUTS[0]), plain[0])
    assert_equal(model, plain)  # what inference mode fetched is used outside of it too


def test_weights_that_were_in_memory_give_the_same_numbers(tmp_path: Path) -> None:
    plain = outputs(made())
    assert_equal(cpu_offload(made(), "cpu"), plain)
    model = disk_offload(made(), tmp_path / "folder", offload_memory=1)
    assert_equal(model, plain)
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name], value) for name, value in made().state_dict().items())
    remove_hook_from_submodules(model)
    assert_equal(model, plain)
    assert_equal(dispatch_model(made(), MAPS["mixed"], offload_dir=tmp_path / "other"), plain)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("memory", [None, 1])
def test_statistics_of_training_are_kept(offload_buffers: bool, memory: int | None, tmp_path: Path) -> None:
    plain = made(training=True)
    model = from_file(tmp_path, {"": "disk"}, offload_buffers=offload_buffers, offload_memory=memory).train()
    for _ in range(2):
        for expected, found in zip(outputs(plain), outputs(model), strict=True):
            assert torch.equal(found, expected)
    assert_equal(model.eval(), outputs(plain.eval()))
    state = get_state_dict_offloaded_model(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_gradients_of_inputs_are_the_same(tmp_path: Path) -> None:
    def gradient(model: nn.Module) -> torch.Tensor:
        x = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH).requires_grad_()
        model.blocks[2](model.blocks[1](x)).square().sum().backward()  # type: ignore[index, operator]
        assert x.grad is not None
        return x.grad

    model = from_file(tmp_path, {"": "disk"}, offload_memory=1)
    expected = gradient(made())
    for _ in range(2):
        assert torch.equal(gradient(model), expected)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_autocast_gives_the_same_numbers(tmp_path: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain = outputs(made())
        model = from_file(tmp_path, {"": "disk"})
        for _ in range(2):
            assert_equal(model, plain)


def test_threads_that_call_one_model_get_their_numbers(tmp_path: Path) -> None:
    plain, model = outputs(made()), from_file(tmp_path, {"": "disk"}, offload_memory="3MB")
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(6):
                    assert torch.equal(model(INPUTS[number]), plain[number])
        except BaseException as failure:
            wrong.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(INPUTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


class Twice(ModelHook):
    def post_forward(self, module: Any, output: Any) -> Any:
        return 2 * output


def test_a_hook_on_a_hook_runs(tmp_path: Path) -> None:
    plain, model = made(), from_file(tmp_path, {"": "disk"})
    for each in (plain, model):
        add_hook_to_module(each.blocks[1].up, Twice(), append=True)
    assert_equal(model, outputs(plain))


def test_compiled_blocks_give_the_numbers_of_compiled_blocks(tmp_path: Path) -> None:
    plain, model = made(), from_file(tmp_path, {"": "disk"})
    expected = outputs(plain)
    for block in model.blocks:
        block.compile(backend="eager")
    for _ in range(2):
        assert_equal(model, expected)


def test_an_error_in_a_forward_leaves_the_model_usable(tmp_path: Path) -> None:
    plain, model = outputs(made()), from_file(tmp_path, {"": "disk"}, offload_memory=1)
    with pytest.raises(RuntimeError, match="shape"):
        model.blocks[0].up(torch.rand(2, 7))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert_equal(model, plain)


def test_a_copy_of_the_model_runs_by_itself(tmp_path: Path) -> None:
    plain, model = outputs(made()), from_file(tmp_path, {"": "disk"})
    assert_equal(model, plain)
    twin = copy.deepcopy(model)
    del model
    assert_equal(twin, plain)


def test_a_file_that_is_changed_while_the_model_is_in_use_is_named(tmp_path: Path) -> None:
    model = from_file(tmp_path, {"": "disk"})
    outputs(model)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(RuntimeError, match=r"model\.safetensors.*to 5000 bytes"):
        outputs(model)


def test_a_checkpoint_that_is_saved_over_its_own_file_is_whole(tmp_path: Path) -> None:
    model = from_file(tmp_path, {"": "cpu"})
    with torch.no_grad():
        model.blocks[0].up.weight.add_(1)
    save_file({name: value for name, value in model.state_dict().items() if name != "head.weight"}, tmp_path / "new")
    (tmp_path / "new").replace(tmp_path / "model.safetensors")
    with init_empty_weights():
        again = Net().eval()
    load_checkpoint_and_dispatch(again, tmp_path, {"": "cpu"})
    assert_equal(again, outputs(model))
