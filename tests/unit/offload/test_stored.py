"""Weight files as memory: pages of the file until they are written to, and errors that name a broken file."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from accelerate._base import pages
from accelerate._base.errors import ConfigurationError
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


def hand_written(path: Path, entries: dict[str, tuple[str, list[int], bytes]]) -> Path:
    """Write a file in the order given, which may leave tensors unaligned."""
    header: dict[str, object] = {}
    content = b""
    for name, (dtype, shape, data) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(content), len(content) + len(data)]}
        content += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)
    return path


def test_a_tensor_at_an_odd_address_is_read(tmp_path: Path) -> None:
    numbers = struct.pack("<3f", 1.5, -2.0, 3.25)
    path = hand_written(tmp_path / "w.safetensors", {"a": ("U8", [1], b"x"), "b": ("F32", [3], numbers)})
    stored = SafetensorsFile(path).find("b")
    assert stored.offset % 4 == 1
    assert not stored.in_place
    assert stored.tensor.tolist() == [1.5, -2.0, 3.25]
    assert SafetensorsFile(path).read("b").data_ptr() % 4 == 0


@pytest.mark.parametrize("missing", ["MAP_PRIVATE", "MAP_NORESERVE"])
def test_a_system_without_an_option_of_mapping_reads_the_same(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "w.safetensors", a=torch.arange(LARGE).float())
    before = path.read_bytes()
    if missing == "MAP_PRIVATE":
        monkeypatch.delattr(mmap, "MAP_PRIVATE")
    else:
        refuse_mapping(monkeypatch, errno.EINVAL)
    found = SafetensorsFile(path).read("a")
    assert torch.equal(found, torch.arange(LARGE).float())
    found.mul_(2)
    assert path.read_bytes() == before


def refuse_mapping(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the system refuse to map files without reserving memory for them."""

    class Refusing(mmap.mmap):
        def __new__(cls, descriptor: int, length: int, flags: int = 0, prot: int = 0) -> Any:
            if flags & 0x4000:
                raise OSError(number, os.strerror(number))
            return super().__new__(cls, descriptor, length, flags=flags, prot=prot)

    monkeypatch.setattr(mmap, "mmap", Refusing)


def test_a_file_that_cannot_be_mapped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "w.safetensors", a=torch.ones(3))
    refuse_mapping(monkeypatch, errno.ENOMEM)
    with pytest.raises(ConfigurationError, match=r"w\.safetensors' cannot be opened \(Cannot allocate memory\)"):
        SafetensorsFile(path).read("a")


def test_pages_that_the_kernel_cannot_populate_come_when_they_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, nbytes: int, advice: int) -> int:
        return -1

    path = write(tmp_path / "w.safetensors", a=torch.ones(LARGE))
    stored = SafetensorsFile(path).find("a")
    monkeypatch.setattr(pages, "_madvise", lambda: refuse)
    stored.populate()
    assert torch.equal(stored.tensor, torch.ones(LARGE))


def test_a_dtype_that_this_module_has_no_name_for_is_read_by_the_package(tmp_path: Path) -> None:
    path = hand_written(tmp_path / "w.safetensors", {"a": ("F4", [4], b"\x21\x43")})
    stored = SafetensorsFile(path).find("a")
    assert stored.stored_dtype is None
    assert stored.tensor.dtype == torch.float4_e2m1fn_x2
    assert stored.tensor.view(torch.uint8).tolist() == [0x21, 0x43]
