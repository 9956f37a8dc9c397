"""Weights of other formats and dtypes, written once for the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accelerate.offload.loading import convert_weights, load_checkpoint_in_model
from accelerate.offload.store import OffloadedWeightsLoader, TorchFile
from accelerate.offload.stored import ALIGNMENT, SafetensorsFile


def net(**kwargs: str) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, **kwargs), nn.Linear(4, 5, **kwargs))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_safetensors_are_used_in_place(tmp_path: Path) -> None:
    source = net()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    target = net(device="meta")
    placeholders = dict(target.named_parameters())
    load_checkpoint_in_model(target, tmp_path / "w.safetensors", {"": "disk"}, offload_folder=tmp_path / "o")
    assert files(tmp_path / "o") == ["index.json"]
    index = json.loads((tmp_path / "o" / "index.json").read_text())
    path = str((tmp_path / "w.safetensors").absolute())
    assert index["1.bias"] == {"safetensors_file": path, "weight_name": "1.bias", "dtype": "float32"}
    assert all(target.get_parameter(name) is tensor for name, tensor in placeholders.items())


@pytest.mark.parametrize("name", ["w.bin", "w.safetensors"])
def test_other_formats_and_smaller_dtypes_are_written_once(name: str, tmp_path: Path) -> None:
    source = net()
    state = source.state_dict()
    save_file(state, tmp_path / name) if name.endswith("safetensors") else torch.save(state, tmp_path / name)
    folder = tmp_path / "o"

    def load() -> nn.Module:
        target = net(device="meta")
        load_checkpoint_in_model(target, tmp_path / name, {"": "disk"}, offload_folder=folder, dtype="bfloat16")
        return target

    target = load()
    assert target[0].weight.dtype == torch.bfloat16
    assert files(folder) == ["index.json", "w.offload.safetensors"]
    written = load_file(folder / "w.offload.safetensors")
    assert all(torch.equal(written[key], value.to(torch.bfloat16)) for key, value in state.items())
    converted = SafetensorsFile(folder / "w.offload.safetensors")
    assert min(converted.find(key).offset for key in converted.names()) % ALIGNMENT == 0
    loader = OffloadedWeightsLoader(save_folder=folder)
    assert torch.equal(loader["0.weight"], source[0].weight.to(torch.bfloat16))
    inode = (folder / "w.offload.safetensors").stat().st_ino
    load()
    assert (folder / "w.offload.safetensors").stat().st_ino == inode
    (tmp_path / name).touch()  # another checkpoint, for all that is known
    load()
    assert (folder / "w.offload.safetensors").stat().st_ino != inode


def test_a_larger_dtype_is_made_while_the_model_runs(tmp_path: Path) -> None:
    source = net().half()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    target = net(device="meta")
    folder = tmp_path / "o"
    load_checkpoint_in_model(
        target, tmp_path / "w.safetensors", {"": "disk"}, offload_folder=folder, dtype=torch.float32
    )
    assert files(folder) == ["index.json"]
    assert torch.equal(OffloadedWeightsLoader(save_folder=folder)["0.weight"], source[0].weight.float())


def test_a_failure_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "w.bin")
    source = TorchFile(tmp_path / "w.bin")
    wanted = {name: torch.empty(2, device="meta") for name in "ab"}

    def fail(name: str, device: torch.device) -> torch.Tensor:
        if name == "b":
            raise ZeroDivisionError
        return torch.ones(2)

    folder = tmp_path / "o"
    folder.mkdir()
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(source, "read", fail)
        convert_weights(source, folder, wanted)
    assert files(folder) == []
    path = convert_weights(source, folder, wanted)
    assert load_file(path)["b"].sum() == 2
    path.write_bytes(path.read_bytes()[:-1])  # a copy that was cut is made again
    monkeypatch.setattr(source, "read", lambda name, device: torch.zeros(2))
    assert convert_weights(source, folder, wanted) == path
    assert load_file(path)["b"].sum() == 0


def test_a_dtype_without_a_name_in_the_format_is_told(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1, dtype=torch.complex128)}, tmp_path / "w.bin")
    source = TorchFile(tmp_path / "w.bin")
    with pytest.raises(ValueError, match=r"'a'.*complex128"):
        convert_weights(source, tmp_path, {"a": source.like("a")})


def test_shapes_that_differ_are_named_before_anything_is_placed(tmp_path: Path) -> None:
    state = net().state_dict() | {"0.weight": torch.rand(4, 9)}
    save_file(state, tmp_path / "w.safetensors")
    for place in ("disk", "cpu"):
        with pytest.raises(ValueError, match=r"\(4, 9\).*'0\.weight'.*\(4, 3\)"):
            load_checkpoint_in_model(
                net(device="meta"), tmp_path / "w.safetensors", {"": place}, offload_folder=tmp_path / "o"
            )


def test_a_broken_torch_file_is_named(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "w.bin")
    whole = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"w\.bin.*cannot be read"):
        load_checkpoint_in_model(net(), tmp_path / "w.bin")
