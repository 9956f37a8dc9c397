"""Weights on disk: the offload folder, lazy mappings, and checkpoints read to their places."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from accelerate.offload.loading import load_checkpoint_in_model, load_offloaded_weights
from accelerate.offload.store import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    checkpoint_files,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_state_dict,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

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


@pytest.mark.parametrize("name", ["w.bin", "w.safetensors"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_loaded_without_a_map(name: str, device: str, tmp_path: Path) -> None:
    source, target = net(), net(device=device)
    path = save(source, tmp_path / name)
    load_checkpoint_in_model(target, path, strict=True)
    path.unlink()
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in target.state_dict().items())
    assert target[0].weight.requires_grad


def test_a_map_sends_weights_to_cpu_meta_and_disk(tmp_path: Path) -> None:
    source, target = net(), net(device="meta")
    save(source, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="offload_folder"):
        load_checkpoint_in_model(target, tmp_path / "w.safetensors", {"": "disk"})
    folder = tmp_path / "offload"
    device_map = {"0": "cpu", "1": "disk", "2": "disk"}
    load_checkpoint_in_model(
        target,
        tmp_path / "w.safetensors",
        device_map,
        offload_folder=folder,
        dtype="float16",
        keep_in_fp32_modules=["2"],
    )
    assert target[0].weight.dtype == torch.float16
    assert target[2].weight.device == META
    index = json.loads((folder / "index.json").read_text())
    assert index["1.weight"]["dtype"] == "float16"
    assert index["2.weight"]["dtype"] == "float32"
    assert "1.running_mean" not in index  # buffers are offloaded only if asked for
    assert target[1].running_mean.device.type == "cpu"
    load_offloaded_weights(target, index, folder)
    assert torch.equal(target[2].weight, source[2].weight)


def test_names_that_differ_are_told(tmp_path: Path) -> None:
    state = {**net().state_dict(), "extra": torch.ones(1)}
    del state["0.bias"]
    torch.save(state, tmp_path / "w.bin")
    with pytest.warns(UserWarning, match="'extra'"):
        load_checkpoint_in_model(net(), tmp_path / "w.bin")
    with pytest.raises(ValueError, match=r"'extra'.*'0\.bias'"):
        load_checkpoint_in_model(net(), tmp_path / "w.bin", strict=True)


@pytest.mark.parametrize("places", [{"": "cpu"}, {"0": "cpu", "1": "disk"}, {"": "disk"}])
def test_a_tied_weight_saved_under_one_name_reaches_both(places: dict[str, str], tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    source, target = tied(), tied()
    save_file({"0.weight": source[0].weight.detach()}, tmp_path / "w.safetensors")
    load_checkpoint_in_model(target, tmp_path / "w.safetensors", places, offload_folder=tmp_path / "o", strict=True)
    if places == {"": "cpu"}:
        assert target[0].weight is target[1].weight
        assert torch.equal(target[0].weight, source[0].weight)
    else:
        assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path / "o")["1.weight"], source[0].weight)
