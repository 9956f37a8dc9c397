"""The files that weights are read from: the offload folder, mappings by name, and the files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.offload.store import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    identity_of_stored,
    load_offloaded_weight,
    load_state_dict,
    offload_state_dict,
    offload_weight,
    offloaded_weights,
)
from accelerate.offload.weight_files import checkpoint_files, save_offload_index

META = torch.device("meta")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool]


def net(**kwargs: str) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, **kwargs), nn.BatchNorm1d(4, **kwargs), nn.Linear(4, 5, **kwargs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_a_weight_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    weight = (torch.rand(shape) * 100 - 50).to(dtype)
    index = offload_weight(weight, "a.b", tmp_path, {})
    assert index == {"a.b": {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}}
    loaded = load_offloaded_weight(tmp_path / "a.b.dat", index["a.b"])
    assert loaded.dtype == dtype
    assert loaded.shape == weight.shape
    assert torch.equal(loaded.reshape(-1).view(torch.uint8), weight.reshape(-1).view(torch.uint8))
    assert (tmp_path / "a.b.dat").stat().st_size == weight.nbytes


def test_writing_to_a_mapped_weight_leaves_the_file_alone(tmp_path: Path) -> None:
    index = offload_weight(torch.zeros(4), "w", tmp_path, {})
    assert index is not None
    load_offloaded_weight(tmp_path / "w.dat", index["w"]).fill_(1.0)
    assert torch.equal(load_offloaded_weight(tmp_path / "w.dat", index["w"]), torch.zeros(4))


def test_a_weight_that_another_process_writes_leaves_the_mapped_one_alone(tmp_path: Path) -> None:
    """Two programs offload models into one folder: the memory of the first is not cut off under its feet."""
    index = offload_weight(torch.ones(2000), "weight", tmp_path, {})
    assert index is not None
    mapped = load_offloaded_weight(tmp_path / "weight.dat", index["weight"])
    before = (tmp_path / "weight.dat").stat().st_ino
    offload_weight(torch.ones(2000), "weight", tmp_path)  # the same model: nothing changes for who has mapped it
    assert (tmp_path / "weight.dat").stat().st_ino == before
    offload_weight(torch.zeros(1), "weight", tmp_path)
    assert mapped.sum() == 2000
    assert (tmp_path / "weight.dat").stat().st_size == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["weight.dat"]


def test_a_non_contiguous_weight_is_written_in_order(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3).t()
    index = offload_weight(weight, "w", tmp_path, {})
    assert index is not None
    assert torch.equal(load_offloaded_weight(tmp_path / "w.dat", index["w"]), weight)


def test_the_index_of_a_folder_grows(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    assert not (tmp_path / "index.json").exists()
    offload_state_dict(tmp_path / "new", {"a": torch.ones(2)})
    offload_state_dict(tmp_path / "new", {"b": torch.ones(3, dtype=torch.int8)})
    text = (tmp_path / "new" / "index.json").read_text()
    assert json.loads(text) == {"a": {"dtype": "float32", "shape": [2]}, "b": {"dtype": "int8", "shape": [3]}}
    assert '\n  "a"' in text
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.dat", "b.dat", "index.json"]


def test_weights_are_read_from_memory_folder_and_safetensors(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"raw": torch.ones(2), "both": torch.zeros(2)})
    loader = OffloadedWeightsLoader({"both": torch.ones(2), "held": torch.ones(1)}, save_folder=tmp_path)
    assert list(loader) == ["both", "held", "raw"]
    assert len(loader) == 3
    assert torch.equal(loader["both"], torch.ones(2))
    assert torch.equal(loader["raw"], torch.ones(2))
    assert "raw" in loader
    assert "none" not in loader
    save_file({"inner": torch.ones(3)}, tmp_path / "w.safetensors")
    entry = {"safetensors_file": str(tmp_path / "w.safetensors"), "weight_name": "inner", "dtype": "bfloat16"}
    pointed = OffloadedWeightsLoader(index={"outer": entry})
    assert torch.equal(pointed["outer"], torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(KeyError):
        loader["none"]
    with pytest.raises(ValueError, match="state_dict=None"):
        OffloadedWeightsLoader()


def test_a_prefix_is_added_on_lookup() -> None:
    view = PrefixedDataset({"a.x": 1, "a.y": 2, "b.x": 3}, "a.")
    assert view["x"] == 1
    assert "y" in view
    assert "z" not in view
    assert list(view) == ["a.x", "a.y"]
    assert len(view) == 3
    assert view.get("z") is None


@given(st.sets(st.sampled_from(["a", "a.b", "ab", "c"])))
def test_sub_modules_are_cut_at_the_dots(names: set[str]) -> None:
    state = {name: torch.ones(1) for name in ("a.b.w", "a.w", "ab.w", "c")}
    expected = {name for name in state if any(name == n or name.startswith(f"{n}.") for n in names)}
    assert extract_submodules_state_dict(state, names).keys() == expected


def test_a_checkpoint_is_found_in_the_usual_places(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        checkpoint_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="0 index files"):
        checkpoint_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "1.safetensors"}}))
    shards = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    assert checkpoint_files(tmp_path) == checkpoint_files(index) == shards
    (tmp_path / "model.safetensors").touch()
    assert checkpoint_files(tmp_path) == [tmp_path / "model.safetensors"]
    (tmp_path / "pytorch_model.bin").touch()
    assert checkpoint_files(tmp_path) == [tmp_path / "pytorch_model.bin"]


def save(model: nn.Module, path: Path) -> Path:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(state, path) if path.suffix == ".bin" else save_file(state, path)
    return path


@pytest.mark.parametrize("name", ["w.bin", "w.safetensors"])
def test_a_file_is_read_to_the_devices_of_a_map(name: str, tmp_path: Path) -> None:
    path = save(net(), tmp_path / name)
    plain = load_state_dict(path)
    assert {value.device.type for value in plain.values()} == {"cpu"}
    placed = load_state_dict(path, {"0": "meta", "1": "disk", "": "cpu"})
    assert {key for key, value in placed.items() if value.device == META} == {"0.weight", "0.bias"}


def test_a_file_for_another_framework_and_one_with_code_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors", metadata={"format": "tf"})
    with pytest.raises(ValueError, match="'tf'"):
        load_state_dict(tmp_path / "w.safetensors")
    torch.save({"a": print}, tmp_path / "w.bin")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load_state_dict(tmp_path / "w.bin")


def test_identity_in_memory_and_in_files(tmp_path: Path) -> None:
    one, other = torch.ones(2), torch.ones(2)
    held = {"a.x": one, "a.y": one, "a.z": other}
    assert identity_of_stored(held, "a.x") == identity_of_stored(held, "a.y") != identity_of_stored(held, "a.z")
    assert identity_of_stored(PrefixedDataset(held, "a."), "x") == identity_of_stored(held, "a.x")

    offload_state_dict(tmp_path, {"b.x": one, "b.z": one})
    folder = OffloadedWeightsLoader(held, save_folder=tmp_path)
    folder.add_aliases([["b.x", "b.y"]])
    assert folder.identity("a.x") == folder.identity("a.y")
    assert folder.identity("b.x") == folder.identity("b.y")
    # Two files with the same bytes may be two weights that happen to be equal.
    assert folder.identity("b.x") != folder.identity("b.z")

    file = tmp_path / "weights.safetensors"
    save_file({"x": one, "z": other}, file)
    index = {name: {"safetensors_file": str(file), "weight_name": name[-1]} for name in ("c.x", "d.x", "c.z")}
    weights = OffloadedWeightsLoader(index=index)
    assert weights.identity("c.x") == weights.identity("d.x") != weights.identity("c.z")


@pytest.mark.parametrize("empty", [True, False])
def test_no_identity_where_only_reading_would_tell(empty: bool) -> None:
    held = {"x": torch.empty(0) if empty else torch.ones(2)}
    assert identity_of_stored(held if empty else MappingProxyType(held), "x") is None


def test_a_raw_file_without_a_folder_is_told() -> None:
    weights = OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [2]}})
    with pytest.raises(ValueError, match=r"'a' as a raw file, and no save_folder.*Pass the folder"):
        weights["a"]


def test_an_index_that_names_no_files_is_told(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": 1}}))
    with pytest.raises(
        ValueError, match=r"index.json' is not an index of shards: 'weight_map' must map.*Give the folder"
    ):
        checkpoint_files(index)


class Block(nn.Module):
    """A module that uses the weights of its children without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.left.weight @ self.right.weight


def test_names_and_values(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), nn.BatchNorm1d(4))
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    assert offloaded_weights(model) == {}
    cpu_offload(model, execution_device="cpu", offload_buffers=True, preload_module_classes=["Block"])
    found = offloaded_weights(model)
    empty = {name for name, value in model.state_dict().items() if value.device.type == "meta"}
    assert set(found) == empty
    assert {"0.left.weight", "0.right.weight", "1.weight", "1.running_mean"} <= empty
    for name, weight in found.items():
        assert torch.equal(weight.read(), wanted[name])


def test_a_dispatched_model_names_what_is_not_there(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wanted = model[1].weight.detach().clone()
    dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    found = offloaded_weights(model)
    assert sorted(found) == ["1.bias", "1.weight"]
    assert torch.equal(found["1.weight"].read(), wanted)


def test_a_shared_module_is_found_under_all_its_names(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    model = disk_offload(nn.Sequential(layer, nn.ReLU(), layer), tmp_path, execution_device="cpu")
    found = offloaded_weights(model)
    assert sorted(found) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert found["0.weight"].identity == found["2.weight"].identity
    assert found["0.weight"].identity != found["0.bias"].identity
