"""Weights written for other programs: their files, their names, and where they come from."""

from __future__ import annotations

import json
import os
import resource
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.logs import logged
from torch import nn

from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_in_model,
)
from accelerate._base.errors import (
    CheckpointError,
    ConfigurationError,
    MissingPackageError,
    UsageError,
    WrongTypeError,
)
from accelerate.checkpointing.weight_folder import STAGE_MARK
from accelerate.config.plugins.training import ProjectConfiguration

SHARD = "17KB"  # one layer of 64 by 64 floats and its bias


class Network(nn.Module):
    """Three layers of one size, the last tied to the first where asked."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))
        self.register_buffer("count", torch.tensor(7))
        if tied:
            self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read what is in the files of a folder, through their index if there is one."""
    indices = list(folder.glob("*.index.json"))
    if indices:
        (index,) = indices
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = [name for name in files(folder) if name.endswith((".bin", ".safetensors"))]
    found: dict[str, torch.Tensor] = {}
    for name in names:
        file = folder / name
        found |= load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    return found


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


def fresh_like(model: nn.Module) -> nn.Module:
    other = Network(tied=isinstance(model, Network) and model.third.weight is model.first.weight)
    assert not torch.equal(other.first.weight, model.get_parameter("first.weight"))
    return other


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("shard", ["10GB", SHARD, 1])
def test_what_is_written_is_read_back(tmp_path: Path, safe: bool, shard: int | str) -> None:
    model = Network()
    Accelerator().save_model(model, tmp_path / "a" / "b", max_shard_size=shard, safe_serialization=safe)
    assert_same(weights(tmp_path / "a" / "b"), model.state_dict())
    other = fresh_like(model)
    load_checkpoint_in_model(other, tmp_path / "a" / "b", strict=True)
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("safe", "single", "index"),
    [
        (True, "model.safetensors", "model.safetensors.index.json"),
        (False, "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ],
)
def test_names_of_files(tmp_path: Path, safe: bool, single: str, index: str) -> None:
    accelerator, model = Accelerator(), Network()
    accelerator.save_model(model, tmp_path / "one", safe_serialization=safe)
    assert files(tmp_path / "one") == [single]
    accelerator.save_model(model, tmp_path / "many", max_shard_size=SHARD, safe_serialization=safe)
    stem, ending = single.split(".")
    shards = [f"{stem}-0000{number}-of-00003.{ending}" for number in (1, 2, 3)]
    assert files(tmp_path / "many") == sorted([*shards, index])
    text = (tmp_path / "many" / index).read_text()
    written = json.loads(text)
    assert written["metadata"] == {"total_size": 3 * (64 * 64 + 64) * 4 + 8}
    assert written["weight_map"]["second.weight"] == shards[1]
    assert text == json.dumps(written, indent=2, sort_keys=True) + "\n"


def test_tied_weights_are_written_once_and_tied_again(tmp_path: Path) -> None:
    accelerator, model = Accelerator(), Network(tied=True)
    with logged(r"first name only: \['third.weight'\]"):  # said once
        accelerator.save_model(model, tmp_path / "safe", max_shard_size=SHARD)
        accelerator.save_model(model, tmp_path / "safe", max_shard_size=SHARD)
    accelerator.save_model(model, tmp_path / "torch", max_shard_size=SHARD, safe_serialization=False)
    everything = model.state_dict()
    assert_same(weights(tmp_path / "torch"), everything)
    assert_same(weights(tmp_path / "safe"), {name: everything[name] for name in everything if name != "third.weight"})
    shards = json.loads((tmp_path / "torch" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert shards["third.weight"] == shards["first.weight"]
    shard = torch.load(tmp_path / "torch" / shards["first.weight"], weights_only=True)
    assert shard["third.weight"].data_ptr() == shard["first.weight"].data_ptr()
    for kind in ("safe", "torch"):
        other = fresh_like(model)
        load_checkpoint_in_model(other, tmp_path / kind, strict=True)
        assert other.third.weight is other.first.weight
        assert_same(other.state_dict(), everything)


@pytest.mark.parametrize("safe", [True, False])
def test_parts_of_one_memory_are_written_each_by_itself(tmp_path: Path, safe: bool) -> None:
    memory = torch.arange(100_000, dtype=torch.float32)
    model = nn.Module()
    model.register_buffer("low", memory[:10])
    model.register_buffer("high", memory[90_000:90_010])
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
    model.register_buffer("wide", torch.ones(1).expand(5))
    model.register_buffer("empty", torch.empty(0, 3))
    Accelerator().save_model(model, tmp_path, safe_serialization=safe)
    assert_same(weights(tmp_path), model.state_dict())
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000


def test_every_dtype(tmp_path: Path) -> None:
    dtypes = [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    ]
    model = nn.Module()
    for dtype in dtypes:
        model.register_buffer(f"as_{str(dtype)[6:]}", torch.arange(3, dtype=torch.float32).to(dtype))
    Accelerator().save_model(model, tmp_path)
    found = weights(tmp_path)
    for name, value in model.state_dict().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8))


def test_a_model_without_weights(tmp_path: Path) -> None:
    Accelerator().save_model(nn.ReLU(), tmp_path)
    assert weights(tmp_path) == {}
    assert files(tmp_path) == ["model.safetensors"]


def test_a_compiled_model_is_written_as_what_it_is_made_from(tmp_path: Path) -> None:
    model = Network()
    compiled = torch.compile(model, backend="eager")
    Accelerator().save_model(compiled, tmp_path)
    assert_same(weights(tmp_path), model.state_dict())
    other = fresh_like(model)
    load_checkpoint_in_model(torch.compile(other, backend="eager"), tmp_path, strict=True)
    assert_same(other.state_dict(), model.state_dict())
    save_file(
        {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    other = fresh_like(model)
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert_same(other.state_dict(), model.state_dict())


class WithNotes(nn.Linear):
    """A layer whose state dict holds more than tensors."""

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}


def test_entries_that_are_no_tensors(tmp_path: Path) -> None:
    model = nn.Sequential(WithNotes(8, 8), nn.Linear(8, 8))
    with pytest.raises(WrongTypeError, match=r"'0._extra_state'.*safe_serialization=False"):
        Accelerator().save_model(model, tmp_path)
    assert files(tmp_path) == []
    Accelerator().save_model(model, tmp_path, max_shard_size=300, safe_serialization=False)
    found: dict[str, Any] = weights(tmp_path)
    for file in tmp_path.glob("*.bin"):
        found |= torch.load(file, weights_only=True)
    assert found["0._extra_state"] == {"version": 3}
    model.load_state_dict(found)


# --- an earlier save --------------------------------------------------------------------------------------------------

WAYS = [(True, "10GB"), (True, SHARD), (True, 1), (False, "10GB"), (False, SHARD)]


@pytest.mark.parametrize("before", WAYS)
@pytest.mark.parametrize("after", WAYS)
def test_an_earlier_save_is_replaced_whole(
    tmp_path: Path, before: tuple[bool, int | str], after: tuple[bool, int | str]
) -> None:
    accelerator, old, new = Accelerator(), Network(), Network()
    foreign = ["config.json", "model_1.safetensors", "model.fp16.safetensors", "tokenizer.model", "optimizer.bin"]
    for name in foreign:
        (tmp_path / name).write_text(name)
    accelerator.save_model(old, tmp_path, safe_serialization=before[0], max_shard_size=before[1])
    accelerator.save_model(new, tmp_path, safe_serialization=after[0], max_shard_size=after[1])
    accelerator.save_model(new, tmp_path / "alone", safe_serialization=after[0], max_shard_size=after[1])
    assert files(tmp_path) == sorted([*foreign, *files(tmp_path / "alone"), "alone"])
    assert [(tmp_path / name).read_text() for name in foreign] == foreign
    for name in foreign:
        (tmp_path / name).unlink()
    read = fresh_like(new)
    load_checkpoint_in_model(read, tmp_path, strict=True)
    assert_same(read.state_dict(), new.state_dict())


def test_a_disk_without_second_names_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, old, new = Accelerator(), Network(), Network()
    accelerator.save_model(old, tmp_path, max_shard_size=SHARD)

    def refuse(self: Path, target: Path) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    accelerator.save_model(new, tmp_path, max_shard_size=SHARD)
    assert_same(weights(tmp_path), new.state_dict())
    assert len(files(tmp_path)) == 4


def test_stages_of_killed_saves_are_removed_and_others_kept(tmp_path: Path) -> None:
    accelerator, model = Accelerator(), Network()
    host = os.uname().nodename
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    dead, alive = (tmp_path / f".{STAGE_MARK}{host}-{process}-aa" for process in (child, os.getpid()))
    elsewhere = tmp_path / f".{STAGE_MARK}other-machine-{child}-aa"
    for folder in (dead, alive, elsewhere):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
    accelerator.save_model(model, tmp_path)
    assert files(tmp_path) == sorted([alive.name, elsewhere.name, "model.safetensors"])


# --- what cannot work -------------------------------------------------------------------------------------------------


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"is a file.*path of a folder"):
        Accelerator().save_model(Network(), file)
    assert file.read_text() == "mine"


def test_a_size_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="10 apples"):
        Accelerator().save_model(Network(), tmp_path / "folder", max_shard_size="10 apples")
    assert not (tmp_path / "folder").exists()


def test_weights_without_data(tmp_path: Path) -> None:
    with init_empty_weights():
        model = Network()
    with pytest.raises(UsageError, match=r"'first.weight'.*meta device"):
        Accelerator().save_model(model, tmp_path)
    assert files(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written") as raised:
        Accelerator().save_model(Network(), tmp_path / "file" / "below")
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize("safe", [True, False])
def test_a_disk_that_takes_no_more(tmp_path: Path, safe: bool) -> None:
    accelerator, old, new = Accelerator(), Network(), Network()
    accelerator.save_model(old, tmp_path, safe_serialization=safe)
    before = files(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))  # of 50 KB
    try:
        with pytest.raises(CheckpointError, match="could not be written") as raised:
            accelerator.save_model(new, tmp_path, safe_serialization=safe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert isinstance(raised.value.__cause__, OSError)
    assert files(tmp_path) == before
    assert_same(weights(tmp_path), old.state_dict())
    accelerator.save_model(new, tmp_path, safe_serialization=safe)
    assert_same(weights(tmp_path), new.state_dict())


@pytest.mark.parametrize("safe", [True, False])
def test_a_failure_while_writing_leaves_the_earlier_save(tmp_path: Path, safe: bool) -> None:
    accelerator, old = Accelerator(), Network()
    accelerator.save_model(old, tmp_path, max_shard_size=SHARD, safe_serialization=safe)
    before = files(tmp_path)

    class Broken(Mapping[str, torch.Tensor]):
        broken = False

        def __getitem__(self, key: str) -> torch.Tensor:
            if key == "third.weight" and self.broken:
                raise OSError("the disk is gone")
            return torch.zeros(64, 64) if key.endswith("weight") else torch.zeros(64)

        def __contains__(self, key: object) -> bool:
            return key in old.state_dict()

        def __iter__(self) -> Iterator[str]:
            return iter(old.state_dict())

        def __len__(self) -> int:
            return len(old.state_dict())

    stored = Broken()
    hooked = cpu_offload(Network(), execution_device="cpu", state_dict=stored)
    stored.broken = True
    with pytest.raises(CheckpointError, match=r"the disk is gone.*can still be read"):
        accelerator.save_model(hooked, tmp_path, max_shard_size=SHARD, safe_serialization=safe)
    assert files(tmp_path) == before
    assert_same(weights(tmp_path), old.state_dict())


# --- offloaded weights ------------------------------------------------------------------------------------------------


def offload(model: nn.Module, how: str, folder: Path) -> nn.Module:
    if how == "cpu":
        return cpu_offload(model, execution_device="cpu", offload_buffers=True)
    if how == "disk":
        return disk_offload(model, folder, execution_device="cpu")
    device_map: dict[str, Any] = {"first": "cpu", "second": "disk", "third": "disk", "count": "cpu"}
    return dispatch_model(model, device_map, offload_dir=folder)


@pytest.mark.parametrize("how", ["cpu", "disk", "mixed"])
@pytest.mark.parametrize("shard", ["10GB", SHARD])
@pytest.mark.parametrize("safe", [True, False])
def test_offloaded_weights(tmp_path: Path, how: str, shard: str, safe: bool) -> None:
    model = Network()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    hooked = offload(model, how, tmp_path / "offload")
    assert any(parameter.device.type == "meta" for parameter in hooked.parameters())
    accelerator = Accelerator()
    accelerator.save_model(hooked, tmp_path / "saved", max_shard_size=shard, safe_serialization=safe)
    assert_same(weights(tmp_path / "saved"), wanted)
    assert_same(accelerator.get_state_dict(hooked), wanted)
    inputs = torch.randn(2, 64)
    plain = Network()
    plain.load_state_dict(wanted)
    assert torch.equal(hooked(inputs), plain(inputs))  # saving took nothing away


@pytest.mark.parametrize("safe", [True, False])
def test_tied_offloaded_weights_are_written_once(tmp_path: Path, safe: bool) -> None:
    model = Network(tied=True)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    hooked = cpu_offload(model, execution_device="cpu")
    with logged("third.weight", times=1 if safe else 0):
        Accelerator().save_model(hooked, tmp_path, safe_serialization=safe)
    if safe:
        del wanted["third.weight"]
    assert_same(weights(tmp_path), wanted)


def test_a_shared_module_that_is_offloaded(tmp_path: Path) -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    hooked = disk_offload(model, tmp_path / "offload", execution_device="cpu")
    Accelerator().save_model(hooked, tmp_path / "saved", safe_serialization=False)
    assert_same(weights(tmp_path / "saved"), wanted)


class Counting(Mapping[str, torch.Tensor]):
    """Weights that are made when they are asked for; tells how many are alive at once."""

    def __init__(self, names: list[str], size: int) -> None:
        self.names, self.size = names, size

    def __getitem__(self, key: str) -> torch.Tensor:
        import numpy

        return torch.from_numpy(numpy.full((self.size, self.size), self.names.index(key), dtype=numpy.float32))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@pytest.mark.parametrize("safe", [True, False])
def test_no_more_than_a_shard_is_in_memory(tmp_path: Path, safe: bool) -> None:
    size, layers = 1024, 8
    weight = size * size * 4
    with init_empty_weights():
        model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))
    stored = Counting([f"{number}.weight" for number in range(layers)], size)
    hooked = cpu_offload(model, execution_device="cpu", state_dict=stored)
    accelerator = Accelerator()
    accelerator.save_model(nn.Linear(1, 1), tmp_path / "warm", safe_serialization=safe)  # imports are no weights
    tracemalloc.start()  # it sees numpy's memory
    accelerator.save_model(hooked, tmp_path / "saved", max_shard_size=2 * weight, safe_serialization=safe)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 2 * weight <= peak < 2.5 * weight  # with the buffers of the writer
    found = weights(tmp_path / "saved")
    assert len(list((tmp_path / "saved").iterdir())) == layers // 2 + 1
    assert all((found[name] == number).all() for number, name in enumerate(stored))


def test_weights_of_another_dtype_than_the_model(tmp_path: Path) -> None:
    with init_empty_weights():
        model = nn.Linear(4, 4).half()
    stored = {"weight": torch.full((4, 4), 0.5), "bias": torch.zeros(4)}
    Accelerator().save_model(cpu_offload(model, execution_device="cpu", state_dict=stored), tmp_path)
    assert_same(weights(tmp_path), {name: value.half() for name, value in stored.items()})


def test_one_copy_a_machine(tmp_path: Path) -> None:
    accelerator = Accelerator(project_config=ProjectConfiguration(save_on_each_node=True))
    accelerator.save_model(Network(), tmp_path)
    assert files(tmp_path) == ["model.safetensors"]


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[Any]:
    """The files of fsspec that are in memory."""
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("before", WAYS)
@pytest.mark.parametrize("after", WAYS)
def test_an_address(tmp_path: Path, memory: Any, before: tuple[bool, int | str], after: tuple[bool, int | str]) -> None:
    accelerator, old, new = Accelerator(), Network(), Network()
    memory.pipe_file("/run/model/config.json", b"{}")
    for model, (safe, size) in ((old, before), (new, after)):
        accelerator.save_model(model, "memory://run/model", max_shard_size=size, safe_serialization=safe)
    accelerator.save_model(new, tmp_path / "local", max_shard_size=after[1], safe_serialization=after[0])
    memory.get("/run/model/", str(tmp_path / "fetched"), recursive=True)
    assert files(tmp_path / "fetched") == sorted(["config.json", *files(tmp_path / "local")])
    for name in files(tmp_path / "local"):
        assert (tmp_path / "fetched" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


def test_an_address_that_fails_in_the_middle(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, old = Accelerator(), Network()
    accelerator.save_model(old, "memory://run/model", max_shard_size=SHARD)
    before = sorted(memory.find("/run"))
    sent: list[str] = []
    put = type(memory).put_file

    def fail_third(self: Any, source: str, target: str, **options: Any) -> None:
        sent.append(target)
        if len(sent) == 3:
            raise OSError("the line is cut")
        put(self, source, target, **options)

    monkeypatch.setattr(type(memory), "put_file", fail_third)
    with pytest.raises(CheckpointError, match=r"'memory://run/model': the line is cut"):
        accelerator.save_model(Network(), "memory://run/model", max_shard_size=SHARD)
    assert sorted(memory.find("/run")) == before
    memory.get("/run/model/", str(tmp_path / "fetched"), recursive=True)
    assert_same(weights(tmp_path / "fetched"), old.state_dict())


def test_an_address_that_nobody_knows() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigurationError, match=r"'nowhere://run'.*protocol"):
        Accelerator().save_model(Network(), "nowhere://run")


def test_an_address_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("fsspec.registry")
    entry = {"class": "no_such_package.Files", "err": "Install no_such_package"}
    monkeypatch.setitem(registry.known_implementations, "far", entry)
    with pytest.raises(MissingPackageError, match=r"'far://run'.*Install no_such_package"):
        Accelerator().save_model(Network(), "far://run")


def test_a_folder_in_place_of_a_file_stops_the_save_and_leaves_no_stage(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors" / "inner").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"could not be written.*Is a directory.*choose another folder"):
        Accelerator().save_model(Network(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
