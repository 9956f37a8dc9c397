"""A model whose files are written anew: saved over what its offloaded weights are read from, and loaded again in any way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import (
    Accelerator,
    cpu_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.hooks.offloaded import get_state_dict_offloaded_model
from accelerate.offload.store import offloaded_weights

X = torch.arange(24.0).reshape(4, 6) / 24
PLACES = {"0": "cpu", "1": "disk", "2": "disk", "3": "disk"}


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    made = Accelerator(cpu=True)
    yield made
    made.reset()


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).eval()
    model[2].running_mean.uniform_()
    return model


def write(model: nn.Module, folder: Path, kind: str) -> None:
    folder.mkdir(exist_ok=True)
    state = get_state_dict_offloaded_model(model)
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        torch.save(state, folder / "pytorch_model.bin")


def loaded(folder: Path, offload: Path, dtype: torch.dtype | None = None) -> nn.Module:
    with init_empty_weights():
        model = net(0)
    return load_checkpoint_and_dispatch(model, folder, device_map=PLACES, offload_folder=offload, dtype=dtype)


def and_dispatch(model: nn.Module, folder: Path, offload: Path) -> nn.Module:
    return load_checkpoint_and_dispatch(model, folder, device_map=PLACES, offload_folder=offload)


def to_another_folder(model: nn.Module, folder: Path, offload: Path) -> nn.Module:
    return load_checkpoint_and_dispatch(model, folder, device_map=PLACES, offload_folder=offload / "another")


def to_the_cpu(model: nn.Module, folder: Path, offload: Path) -> nn.Module:
    return load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})


def in_model(model: nn.Module, folder: Path, offload: Path) -> nn.Module:
    load_checkpoint_in_model(model, folder)
    return model


def in_model_by_map(model: nn.Module, folder: Path, offload: Path) -> nn.Module:
    load_checkpoint_in_model(model, folder, device_map=PLACES, offload_folder=offload)
    return model


def in_model_then_dispatched(model: nn.Module, folder: Path, offload: Path) -> nn.Module:
    return dispatch_model(in_model_by_map(model, folder, offload), PLACES, offload_dir=offload)


def without_hooks(model: nn.Module, folder: Path, offload: Path) -> nn.Module:
    return in_model(remove_hook_from_module(model, recurse=True), folder, offload)


def in_a_new_model(model: nn.Module, folder: Path, offload: Path) -> nn.Module:
    return loaded(folder, offload)


WAYS = [
    and_dispatch,
    to_another_folder,
    to_the_cpu,
    in_model,
    in_model_by_map,
    in_model_then_dispatched,
    without_hooks,
    in_a_new_model,
]


LoadAgain = Callable[[nn.Module, Path, Path], nn.Module]


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    for _ in range(2):
        assert torch.equal(model(X), plain(X))
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == plain.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("load_again", WAYS)
def test_what_was_written_over_the_files_is_loaded(load_again: LoadAgain, kind: str, tmp_path: Path) -> None:
    folder, offload = tmp_path / "checkpoint", tmp_path / "offload"
    write(net(1), folder, kind)
    model = loaded(folder, offload)
    assert_same(model, net(1))
    for seed in (2, 3):
        write(net(seed), folder, kind)
        model = load_again(model, folder, offload)
        assert_same(model, net(seed))


@pytest.mark.parametrize("load_again", WAYS)
@pytest.mark.parametrize("shard", [10**9, 150])
@pytest.mark.parametrize("safe", [True, False])
def test_a_model_saved_over_its_own_files_is_loaded_again(
    load_again: LoadAgain, shard: int, safe: bool, tmp_path: Path, accelerator: Accelerator
) -> None:
    folder, offload = tmp_path / "checkpoint", tmp_path / "offload"
    write(net(1), folder, "safetensors")
    model = loaded(folder, offload)
    accelerator.save_model(model, folder, max_shard_size=shard, safe_serialization=safe)
    assert_same(load_again(model, folder, offload), net(1))


@pytest.mark.parametrize("shard", [10**9, 150])
def test_a_model_saved_over_its_own_files_runs_on(shard: int, tmp_path: Path, accelerator: Accelerator) -> None:
    folder, offload = tmp_path / "checkpoint", tmp_path / "offload"
    write(net(1), folder, "safetensors")
    model = loaded(folder, offload)
    assert_same(model, net(1))
    for _ in range(2):
        accelerator.save_model(model, folder, max_shard_size=shard)
        assert_same(model, net(1))
    assert all(parameter.device.type == "meta" for parameter in model[1:].parameters())
    # The index of the folder has followed too.
    assert_same(dispatch_model(model, PLACES, offload_dir=offload), net(1))


def test_files_that_a_save_does_not_touch_stay_in_use(tmp_path: Path, accelerator: Accelerator) -> None:
    save_file(net(1).state_dict(), tmp_path / "weights.safetensors")
    with init_empty_weights():
        model = net(0)
    load_checkpoint_and_dispatch(model, tmp_path / "weights.safetensors", {"": "disk"}, offload_folder=tmp_path)
    accelerator.save_model(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert_same(model, net(1))


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_another_dtype_is_loaded_into_a_dispatched_model(kind: str, tmp_path: Path) -> None:
    folder, offload = tmp_path / "checkpoint", tmp_path / "offload"
    write(net(1), folder, kind)
    model = loaded(folder, offload, torch.bfloat16)
    write(net(2), folder, kind)
    load_checkpoint_in_model(model, folder, dtype=torch.float32)
    assert_same(model, net(2))
    load_checkpoint_in_model(model, folder, dtype=torch.bfloat16)
    assert torch.equal(model(X.bfloat16()), net(2).bfloat16()(X.bfloat16()))


def test_weights_that_are_offloaded_to_memory_are_replaced_there(tmp_path: Path) -> None:
    given = {name: value.clone() for name, value in net(1).state_dict().items()}
    model = cpu_offload(net(1), "cpu", state_dict=given)
    write(net(2), tmp_path, "safetensors")
    load_checkpoint_in_model(model, tmp_path)
    assert_same(model, net(2))
    assert torch.equal(given["1.weight"], net(1)[1].weight)  # the dictionary is the caller's


def test_a_smaller_dtype_needs_a_folder_and_the_same_one_does_not(tmp_path: Path) -> None:
    write(net(1), tmp_path, "safetensors")
    file = str(tmp_path / "model.safetensors")
    index = {name: {"safetensors_file": file, "weight_name": name, "dtype": "float32"} for name in net(1).state_dict()}
    with init_empty_weights():
        model = net(0)
    dispatch_model(model, {"": "disk"}, offload_index=index)
    write(net(2), tmp_path, "safetensors")
    with pytest.raises(ValueError, match="Pass offload_folder"):
        load_checkpoint_in_model(model, tmp_path, dtype=torch.float16)
    load_checkpoint_in_model(model, tmp_path, dtype=torch.float32)
    assert_same(model, net(2))


MAPS = [{"": "cpu"}, {"": "disk"}, {"0": "disk", "1": "cpu", "2": "disk", "3": "cpu"}]


@pytest.mark.parametrize("then", MAPS, ids=["cpu", "disk", "mixed"])
@pytest.mark.parametrize("from_files", [True, False])
def test_a_model_is_dispatched_by_another_map(from_files: bool, then: dict[str, str], tmp_path: Path) -> None:
    if from_files:
        write(net(1), tmp_path / "checkpoint", "safetensors")
        model: nn.Module = loaded(tmp_path / "checkpoint", tmp_path / "offload")
    else:
        model = dispatch_model(net(1), PLACES, offload_dir=tmp_path / "offload")
    assert_same(model, net(1))
    dispatch_model(model, then, offload_dir=tmp_path / "then")
    on_disk = {name.partition(".")[0] for name in offloaded_weights(model)}
    assert on_disk == {name for name in "0123" if then.get(name, then.get("")) == "disk"}
    assert_same(model, net(1))


class Doubled(ModelHook):
    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return 2 * output


def test_hooks_of_ones_own_outlive_another_dispatch(tmp_path: Path) -> None:
    model = dispatch_model(net(1), PLACES, offload_dir=tmp_path)
    add_hook_to_module(model[3], Doubled(), append=True)
    add_hook_to_module(model[3], Doubled(), append=True)
    assert set(offloaded_weights(model)) >= {"3.weight", "3.bias"}
    dispatch_model(model, {"": "cpu"})
    assert offloaded_weights(model) == {}
    assert torch.equal(model(X), 4 * net(1)(X))
