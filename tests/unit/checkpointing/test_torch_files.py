"""Files that one process writes, and that run no code when they are read, by several threads or one."""

from __future__ import annotations

import errno
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from tests.support.logs import logged
from tests.support.processes import run_group
from torch.utils._pytree import tree_leaves

from accelerate import Accelerator, PartialState
from accelerate._base import pages
from accelerate._base.errors import WrongTypeError
from accelerate.checkpointing import torch_files
from accelerate.checkpointing.files import checksum
from accelerate.checkpointing.torch_files import load, load_in_threads, save


def test_a_torch_file(tmp_path: Path) -> None:
    value = {"weights": torch.arange(3.0), "step": 7, "nested": [torch.ones(1), ("a", None)]}
    save(value, tmp_path / "file.bin")
    found = load(tmp_path / "file.bin", map_location="cpu")
    assert torch.equal(found["weights"], value["weights"])  # type: ignore[arg-type]
    assert (found["step"], found["nested"][1]) == (7, ("a", None))
    stream = io.BytesIO()
    save({"x": 1}, stream)
    stream.seek(0)
    assert load(stream) == {"x": 1}


def test_safetensors_of_a_model_with_tied_weights(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    state = model.state_dict()
    with logged(r"first name only: \['1.weight'\]"):
        Accelerator().save(state, tmp_path / "model.safetensors", safe_serialization=True)
    found = load_file(tmp_path / "model.safetensors")
    assert list(found) == ["0.weight"]
    assert torch.equal(found["0.weight"], model[0].weight)
    assert list(state) == ["0.weight", "1.weight"]  # the caller's own stays whole


def test_parts_of_one_memory_are_all_saved(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"first": whole[0], "second": whole[1], "turned": whole.T, "whole": whole, "none": torch.empty(0)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with logged("share memory", times=0):
        save(state, tmp_path / "parts.safetensors", safe_serialization=True)
    found = load_file(tmp_path / "parts.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("value", [[torch.ones(1)], {"a": {"b": torch.ones(1)}}, torch.ones(1), {"a": 1}])
def test_safetensors_hold_tensors_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(WrongTypeError, match="flat mapping"):
        save(value, tmp_path / "x", safe_serialization=True)
    assert not (tmp_path / "x").exists()


def test_safetensors_need_a_path() -> None:
    with pytest.raises(WrongTypeError, match="Pass a path"):
        save({"a": torch.ones(1)}, io.BytesIO(), safe_serialization=True)


class Malicious:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (self.target,)


def test_a_file_with_code_is_refused(tmp_path: Path) -> None:
    path, target = tmp_path / "evil.bin", tmp_path / "made by the pickle"
    torch.save({"x": Malicious(str(target))}, path)
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load(path)
    assert not target.exists()
    load(path, weights_only=False)  # only who asks for it gets it
    assert target.exists()


def test_a_numpy_random_state_is_accepted(tmp_path: Path) -> None:
    numpy.random.seed(3)
    torch.save({"numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}, tmp_path / "rng.pkl")
    expected = numpy.random.rand()
    numpy.random.set_state(load(tmp_path / "rng.pkl")["numpy"])
    assert numpy.random.rand() == expected
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "rng.pkl", weights_only=True)  # the permission does not outlive the call


def save_on_ranks(folder: str) -> None:
    rank = PartialState().process_index
    save({"rank": rank}, Path(folder, f"once_{rank}"))
    save({"rank": rank}, Path(folder, f"machine_{rank}"), save_on_each_node=True)
    PartialState().wait_for_everyone()


def test_one_process_writes(tmp_path: Path) -> None:
    run_group(save_on_ranks, 2, str(tmp_path), env={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["machine_0", "machine_1", "once_0"]


needs_populate = pytest.mark.skipif(not pages.can_populate(), reason="this kernel cannot populate a mapping")


@pytest.fixture
def small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read files of every size in several threads."""
    monkeypatch.setattr(torch_files, "_THREADS_FROM", 0)


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


@needs_populate
@pytest.mark.usefixtures("small_files_too")
def test_what_is_read_is_what_torch_reads(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.bin", state())
    ours, theirs = load_in_threads(path, map_location="cpu"), torch.load(path, weights_only=True)
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.stride(), one.requires_grad) == (other.dtype, other.stride(), other.requires_grad)
            assert torch.equal(one, other)
        else:
            assert one == other
    assert not is_mapped(path)


@needs_populate
@pytest.mark.usefixtures("small_files_too")
def test_views_of_one_memory_stay_views(tmp_path: Path) -> None:
    found = load_in_threads(saved(tmp_path / "state.bin", state()), map_location="cpu")
    found["whole"].zero_()
    first, turned, inside = *found["views"][:2], found["views"][2]["slice"]
    assert not first.any()
    assert not turned.any()
    assert not inside.any()


@needs_populate
@pytest.mark.usefixtures("small_files_too")
def test_writing_to_it_does_not_reach_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.bin", state())
    load_in_threads(path, map_location="cpu")["whole"].zero_()
    assert load_in_threads(path, map_location="cpu")["whole"].any()


class Holder:
    """An object of the user's with a tensor inside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@needs_populate
@pytest.mark.usefixtures("small_files_too")
def test_tensors_inside_of_objects_are_not_left_mapped(tmp_path: Path) -> None:
    path = saved(tmp_path / "state.bin", {"held": Holder(torch.ones(50)), "plain": torch.ones(50)})
    with torch.serialization.safe_globals([Holder]):
        found = load_in_threads(path, map_location="cpu")
    assert torch.equal(found["held"].tensor, torch.ones(50))
    assert not is_mapped(path)


@needs_populate
@pytest.mark.usefixtures("small_files_too")
def test_sparse_tensors_and_old_files(tmp_path: Path) -> None:
    sparse = saved(tmp_path / "sparse.bin", {"sparse": torch.eye(4).to_sparse(), "dense": torch.ones(3)})
    assert torch.equal(load_in_threads(sparse, map_location="cpu")["sparse"].to_dense(), torch.eye(4))
    old = tmp_path / "old.bin"
    torch.save({"w": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    assert torch.equal(load_in_threads(old, map_location="cpu")["w"], torch.ones(3))


@needs_populate
@pytest.mark.usefixtures("small_files_too")
def test_a_disk_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says that pages do not come; it cannot be made to here, so its answer is given in its place."""
    path = saved(tmp_path / "state.bin", {"w": torch.ones(100_000)})
    monkeypatch.setattr(pages, "populate", lambda address, nbytes: False)
    for read in (lambda: load_in_threads(path, map_location="cpu"), lambda: checksum(path)):
        with pytest.raises(OSError, match="Input/output error") as caught:
            read()
        assert caught.value.errno == errno.EIO


@needs_populate
@pytest.mark.usefixtures("small_files_too")
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
