from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from accelerate.checkpointing.checksum import checksum
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.manifest import FileRecord

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StagedFolder]:
    with closing(StagedFolder(tmp_path)) as staged:
        yield staged


def test_tensors_of_every_kind_are_read_back_by_the_safetensors_package(folder: StagedFolder) -> None:
    tensors = {f"of {dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "trained": torch.nn.Parameter(torch.ones(3)),
        "large": torch.randn(600, 1000),
        "strange \n\"name'": torch.ones(1),
    }
    folder.write_tensors("file.safetensors", tensors, {"format": "pt"})
    (record,) = folder.finish()
    found = load_file(folder.path / "file.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        # Compared as bytes: torch compares no float8.
        left, right = (entry.detach().contiguous().reshape(-1).view(torch.uint8) for entry in (found[name], tensor))
        assert found[name].shape == tensor.shape
        assert torch.equal(left, right)
    with safe_open(folder.path / "file.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert record.size == (folder.path / "file.safetensors").stat().st_size


def test_what_safetensors_cannot_hold_is_refused(folder: StagedFolder) -> None:
    with pytest.raises(TypeError, match=r"'extra' is a dict.*safe_serialization=False"):
        folder.write_tensors("file.safetensors", {"extra": {}}, {})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"torch\.complex128"):
        folder.write_tensors("file.safetensors", {"wide": torch.ones(1, dtype=torch.complex128)}, {})


def test_the_sums_are_those_of_the_bytes_on_the_disk(folder: StagedFolder) -> None:
    folder.write_torch("small.bin", {"a": 1})
    folder.write_torch("large.bin", {"a": torch.randn(3, 700_000), "b": torch.ones(5)})
    folder.write_tensors("sub/model.safetensors", {"a": torch.randn(2_000_000)}, {})
    folder.write_json("facts.json", {"step": 3})
    for record in folder.finish():
        content = (folder.path / record.name).read_bytes()
        assert record == FileRecord(record.name, len(content), checksum(folder.path / record.name))
    loaded = torch.load(folder.path / "large.bin", weights_only=True)
    assert loaded["b"].tolist() == [1.0] * 5


def test_files_that_others_wrote_are_recorded(folder: StagedFolder) -> None:
    (folder.path / "shards" / "deep").mkdir(parents=True)
    (folder.path / "shards" / "one").write_bytes(b"1")
    (folder.path / "shards" / "deep" / "two").write_bytes(b"22")
    folder.adopt(folder.path / "shards")
    assert {record.name: record.size for record in folder.finish()} == {"shards/deep/two": 2, "shards/one": 1}


@pytest.mark.parametrize("large", [False, True])
def test_an_error_of_the_disk_names_the_file(folder: StagedFolder, large: bool) -> None:
    # A device that is always full.
    (folder.path / "full.bin").symlink_to("/dev/full")
    value = torch.randn(2_000_000) if large else torch.ones(1)
    with pytest.raises(OSError, match=r"No space left on device: .*full\.bin"):
        folder.write_torch("full.bin", value)
    with pytest.raises(OSError, match=r"No space left on device: .*full\.bin"):
        folder.write_tensors("full.bin", {"a": value}, {})
