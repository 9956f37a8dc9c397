"""Weight files as memory: pages of the file until they are written to, and errors that name a broken file."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelerate.offload.store import OffloadedWeightsLoader, offload_state_dict
from accelerate.offload.stored import ALIGNMENT, SMALL, RawFile, SafetensorsFile
from accelerate.offload.tensors import id_tensor_storage

LARGE = SMALL // 4 + 100
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (300, 1000)])
def test_a_tensor_is_what_safetensors_reads(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", a=(torch.rand(shape) * 50).to(dtype), b=torch.rand(3))
    file = SafetensorsFile(path)
    for name, plain in load_file(path).items():
        found = file.read(name)
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8))


def test_large_tensors_are_the_pages_of_the_file_and_small_ones_are_aligned(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", large=torch.rand(LARGE), small=torch.rand(5))
    file = SafetensorsFile(path)
    large = file.find("large")
    assert large.in_place
    assert large.tensor.data_ptr() % os.sysconf("SC_PAGESIZE") == large.offset % os.sysconf("SC_PAGESIZE")
    small = file.find("small")
    assert small.tensor.data_ptr() % ALIGNMENT == 0
    assert small.in_place is (small.offset % ALIGNMENT == 0)


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", a=torch.ones(LARGE))
    before = path.read_bytes()
    first, second = SafetensorsFile(path), SafetensorsFile(path)
    with torch.inference_mode():
        first.read("a").mul_(3)
    assert first.read("a")[0] == 3  # the page belongs to this mapping now
    assert second.read("a")[0] == 1
    assert path.read_bytes() == before
    offload_state_dict(tmp_path / "raw", {"a": torch.ones(4)})
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "raw")
    loader["a"].zero_()
    assert OffloadedWeightsLoader(save_folder=tmp_path / "raw")["a"].sum() == 4


def test_tensors_of_one_file_do_not_look_tied(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", a=torch.ones(LARGE), b=torch.ones(LARGE))
    file = SafetensorsFile(path)
    assert id_tensor_storage(file.read("a")) != id_tensor_storage(file.read("b"))
    save_file({"a": file.read("a"), "b": file.read("b")}, tmp_path / "again.safetensors")
    assert load_file(tmp_path / "again.safetensors").keys() == {"a", "b"}


def test_a_tensor_made_in_inference_mode_can_be_trained_with(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", a=torch.ones(LARGE))
    with torch.inference_mode():
        tensor = SafetensorsFile(path).read("a")
    assert not tensor.is_inference()


def test_a_missing_or_cut_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.safetensors.*cannot be opened"):
        SafetensorsFile(tmp_path / "nowhere.safetensors")
    path = write(tmp_path / "w.safetensors", a=torch.rand(LARGE))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"w\.safetensors.*cut off.*{len(whole)}"):
        SafetensorsFile(path)
    path.write_bytes(whole[:20])
    with pytest.raises(ValueError, match=r"w\.safetensors.*header"):
        SafetensorsFile(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"w\.safetensors"):
        SafetensorsFile(path)
    path.write_bytes(struct.pack("<Q", 5) + b"{'a':")
    with pytest.raises(ValueError, match=r"w\.safetensors"):
        SafetensorsFile(path)
    raw = tmp_path / "a.dat"
    raw.write_bytes(b"123")
    with pytest.raises(ValueError, match=r"a\.dat.*cut off.*4 bytes.*3"):
        RawFile(raw, (1,), torch.float32)
    with pytest.raises(ValueError, match=r"b\.dat"):
        RawFile(tmp_path / "b.dat", (1,), torch.float32)


def test_a_name_that_is_not_in_the_file_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", a=torch.rand(3))
    loader = OffloadedWeightsLoader(index={"x": {"safetensors_file": str(path), "weight_name": "x"}})
    with pytest.raises(ValueError, match=r"w\.safetensors.*no tensor 'x'"):
        loader["x"]


def test_a_file_that_is_replaced_or_removed_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "w.safetensors", a=torch.ones(LARGE))
    file = SafetensorsFile(path)
    file.check()
    write(tmp_path / "new", a=torch.ones(LARGE))
    (tmp_path / "new").replace(path)
    with pytest.raises(RuntimeError, match=r"w\.safetensors.*was replaced by another file"):
        file.check()
    path.unlink()
    with pytest.raises(RuntimeError, match=r"w\.safetensors.*is not there any more"):
        file.check()


def test_a_change_of_the_file_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "v.safetensors", a=torch.ones(LARGE))
    file = SafetensorsFile(path)
    os.utime(path, ns=(1, 1))
    with pytest.raises(RuntimeError, match=r"v\.safetensors.*changed in place"):
        file.check()
    os.truncate(path, 100)
    with pytest.raises(RuntimeError, match=rf"v\.safetensors.*from {file.size} to 100 bytes"):
        file.check()
