from __future__ import annotations

import random
import resource
import zlib
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from accelerate._base import pages
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import files
from accelerate.checkpointing.files import (
    _SEGMENT,
    Checksum,
    FileRecord,
    FolderWriter,
    PendingSave,
    WorkerThread,
    checksum,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FolderWriter]:
    with closing(FolderWriter(tmp_path)) as staged:
        yield staged


def test_tensors_of_every_kind_are_read_back_by_the_safetensors_package(folder: FolderWriter) -> None:
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


def test_what_safetensors_cannot_hold_is_refused(folder: FolderWriter) -> None:
    with pytest.raises(TypeError, match=r"'extra' is a dict.*safe_serialization=False"):
        folder.write_tensors("file.safetensors", {"extra": {}}, {})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"torch\.complex128"):
        folder.write_tensors("file.safetensors", {"wide": torch.ones(1, dtype=torch.complex128)}, {})


def test_the_sums_are_those_of_the_bytes_on_the_disk(folder: FolderWriter) -> None:
    folder.write_torch("small.bin", {"a": 1})
    folder.write_torch("large.bin", {"a": torch.randn(3, 700_000), "b": torch.ones(5)})
    folder.write_tensors("sub/model.safetensors", {"a": torch.randn(2_000_000)}, {})
    folder.write_json("facts.json", {"step": 3})
    for record in folder.finish():
        content = (folder.path / record.name).read_bytes()
        assert record == FileRecord(record.name, len(content), checksum(folder.path / record.name))
    loaded = torch.load(folder.path / "large.bin", weights_only=True)
    assert loaded["b"].tolist() == [1.0] * 5


def test_files_that_others_wrote_are_recorded(folder: FolderWriter) -> None:
    (folder.path / "shards" / "deep").mkdir(parents=True)
    (folder.path / "shards" / "one").write_bytes(b"1")
    (folder.path / "shards" / "deep" / "two").write_bytes(b"22")
    folder.add_written(folder.path / "shards")
    assert {record.name: record.size for record in folder.finish()} == {"shards/deep/two": 2, "shards/one": 1}


@pytest.mark.parametrize("large", [False, True])
def test_an_error_of_the_disk_names_the_file(folder: FolderWriter, large: bool) -> None:
    value = torch.randn(2_000_000) if large else torch.ones(100)
    (folder.path / "full.bin").write_text("before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As on a disk that is full after so many bytes.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*full\.bin"):
            folder.write_torch("full.bin", value)
        with pytest.raises(OSError, match=r"File too large: .*full\.bin"):
            folder.write_tensors("full.bin", {"a": value}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in folder.path.iterdir()] == ["full.bin"]
    assert (folder.path / "full.bin").read_text() == "before"


def test_what_is_at_the_place_of_a_file_is_replaced_and_not_written_through(folder: FolderWriter) -> None:
    mine = folder.path / "mine"
    mine.write_text("mine")
    for name in ("a.bin", "b.safetensors", "c.json"):
        (folder.path / name).symlink_to(mine)
    (folder.path / "d.bin").symlink_to(folder.path / "not there")
    folder.write_torch("a.bin", torch.ones(1))
    folder.write_tensors("b.safetensors", {"a": torch.ones(1)}, {})
    folder.write_json("c.json", 1)
    folder.write_torch("d.bin", torch.ones(1))
    records = folder.finish()
    assert mine.read_text() == "mine"
    assert not (folder.path / "not there").exists()
    assert not any((folder.path / record.name).is_symlink() for record in records)
    assert [record.problem(folder.path, checksums=True) for record in records] == [None] * 4


SIZES = [0, 1, 1000, _SEGMENT - 1, _SEGMENT, _SEGMENT + 1, 3 * _SEGMENT + 777]


def of(content: bytes, cuts: list[int] | None = None) -> str:
    total = Checksum()
    edges = [0, *sorted(cuts or []), len(content)]
    for begin, end in pairwise(edges):
        total.update(memoryview(content)[begin:end])
    return str(total)


@pytest.mark.parametrize("size", SIZES)
def test_it_does_not_depend_on_how_the_bytes_come(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    expected = of(content)
    assert checksum(tmp_path / "file") == expected
    for seed in range(5):
        generator = random.Random(seed)
        cuts = [generator.randrange(size + 1) for _ in range(generator.randrange(20))]
        assert of(content, cuts) == expected


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_kind_of_damage_changes_it(size: int) -> None:
    generator = random.Random(size)
    content = generator.randbytes(size)
    expected = of(content)
    for _ in range(20):
        damaged = bytearray(content)
        damaged[generator.randrange(size)] ^= 1 << generator.randrange(8)
        assert of(bytes(damaged)) != expected
    assert of(content[:-1]) != expected
    assert of(content + b"\0") != expected
    if size > 3 * 4096:
        blocks = [content[begin : begin + 4096] for begin in range(0, size, 4096)]
        assert of(b"".join([blocks[1], blocks[0], *blocks[2:]])) != expected
        assert of(b"".join([blocks[0], bytes(4096), *blocks[2:]])) != expected


def test_a_small_file_has_its_crc() -> None:
    assert of(b"some text") == f"column-sums:{zlib.crc32(b'some text'):08x}"


@pytest.mark.skipif(not pages.can_populate(), reason="this kernel cannot populate a mapping")
def test_mapped_and_read_files_have_the_same_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(torch.randint(256, (3 * _SEGMENT + 17,), dtype=torch.uint8).numpy().tobytes())
    mapped = checksum(path)
    monkeypatch.setattr(pages, "can_populate", lambda: False)
    assert checksum(path) == mapped
    monkeypatch.undo()
    monkeypatch.setattr(files, "_MAPPED_AT_ONCE", _SEGMENT)
    assert checksum(path) == mapped


def test_what_a_function_raises_in_the_thread_is_raised_where_its_result_is_wanted() -> None:
    def fail() -> None:
        raise OSError("the disk is gone")

    thread = WorkerThread("test")
    failed, fine = thread.submit(fail), thread.submit(lambda: 3)
    with pytest.raises(OSError, match="the disk is gone"):
        failed.result(60)
    assert fine.result(60) == 3
    thread.close()


def test_a_pending_save_is_waited_for_and_its_failure_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    done = PendingSave(Path("state"), lambda: None)
    assert done.wait() == Path("state")

    def fail() -> None:
        raise CheckpointError("full")

    failed = PendingSave(Path("state"), fail)
    with pytest.raises(CheckpointError, match="full"):
        failed.wait()
    assert "full" in caplog.text
