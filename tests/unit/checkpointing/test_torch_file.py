"""Torch files that several threads read: the same as torch.load gives, in memory of its own."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from accelerate._base import pages
from accelerate.checkpointing import checksum, torch_file

pytestmark = pytest.mark.skipif(not pages.can_populate(), reason="this kernel cannot populate a mapping")


@pytest.fixture(autouse=True)
def small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "_WORTH_IT", 0)


def state() -> dict[str, Any]:
    whole = torch.arange(3000.0).reshape(3, 1000)
    return {
        "whole": whole,
        "views": [whole[1], whole.t(), {"slice": whole[:, 5:9]}],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "kinds": (
            torch.tensor(5),
            torch.randn(4, dtype=torch.complex64),
            torch.randn(40).bfloat16(),
            torch.ones(2) > 0,
        ),
        "empty": torch.empty(0, 3),
        "step": 7,
    }


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def test_what_is_read_is_what_torch_reads(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.bin", state())
    ours, theirs = torch_file.read(path, map_location="cpu"), torch.load(path, weights_only=True)
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.stride(), one.requires_grad) == (other.dtype, other.stride(), other.requires_grad)
            assert torch.equal(one, other)
        else:
            assert one == other
    assert not is_mapped(path)


def test_views_of_one_memory_stay_views(tmp_path: Path) -> None:
    found = torch_file.read(saved(tmp_path / "state.bin", state()), map_location="cpu")
    found["whole"].zero_()
    first, turned, inside = *found["views"][:2], found["views"][2]["slice"]
    assert not first.any()
    assert not turned.any()
    assert not inside.any()


def test_writing_to_it_does_not_reach_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.bin", state())
    torch_file.read(path, map_location="cpu")["whole"].zero_()
    assert torch_file.read(path, map_location="cpu")["whole"].any()


class Holder:
    """An object of the user's with a tensor inside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_tensors_inside_of_objects_are_not_left_mapped(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.bin", {"held": Holder(torch.ones(50)), "plain": torch.ones(50)})
    with torch.serialization.safe_globals([Holder]):
        found = torch_file.read(path, map_location="cpu")
    assert torch.equal(found["held"].tensor, torch.ones(50))
    assert not is_mapped(path)


def test_sparse_tensors_and_old_files(tmp_path: Path) -> None:
    sparse = saved(tmp_path / "sparse.bin", {"sparse": torch.eye(4).to_sparse(), "dense": torch.ones(3)})
    assert torch.equal(torch_file.read(sparse, map_location="cpu")["sparse"].to_dense(), torch.eye(4))
    old = tmp_path / "old.bin"
    torch.save({"w": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    assert torch.equal(torch_file.read(old, map_location="cpu")["w"], torch.ones(3))


def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says that pages do not come; it cannot be made to here, so its answer is given in its place."""
    path = saved(tmp_path / "state.bin", {"w": torch.ones(100_000)})
    monkeypatch.setattr(pages, "populate", lambda address, nbytes: False)
    for read in (lambda: torch_file.read(path, map_location="cpu"), lambda: checksum.checksum(path)):
        with pytest.raises(OSError, match="Input/output error") as caught:
            read()
        assert caught.value.errno == errno.EIO


def test_the_kernel_says_that_pages_beyond_the_end_do_not_come(tmp_path: Path) -> None:
    import mmap

    import numpy

    path = tmp_path / "cut"
    path.write_bytes(bytes(8 * mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        address = numpy.frombuffer(mapped, numpy.uint8).ctypes.data
        assert pages.populate(address, 8 * mmap.PAGESIZE)
        file.truncate(mmap.PAGESIZE)
        assert not pages.populate(address, 8 * mmap.PAGESIZE)


def test_mapped_and_read_files_have_the_same_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(torch.randint(256, (3 * checksum._SEGMENT + 17,), dtype=torch.uint8).numpy().tobytes())
    mapped = checksum.checksum(path)
    monkeypatch.setattr(pages, "can_populate", lambda: False)
    assert checksum.checksum(path) == mapped
    monkeypatch.undo()
    monkeypatch.setattr(checksum, "_MAPPED_AT_ONCE", checksum._SEGMENT)
    assert checksum.checksum(path) == mapped
