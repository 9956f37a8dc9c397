"""Checkpoints loaded into a model: to their places, and converted once for the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.support.logs import logged
from torch import nn

from accelerate import load_checkpoint_and_dispatch
from accelerate._base.errors import ConfigurationError
from accelerate.offload.loading import convert_weights, load_checkpoint_in_model, load_offloaded_weights
from accelerate.offload.store import OffloadedWeightsLoader, TorchFile, load_state_dict
from accelerate.offload.stored import ALIGNMENT, SafetensorsFile

META = torch.device("meta")


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
    assert index["1.bias"].items() >= {"safetensors_file": path, "weight_name": "1.bias", "dtype": "float32"}.items()
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
    with pytest.raises(RuntimeError, match=r"'0\.weight'"):  # as torch's own load_state_dict
        load_checkpoint_in_model(net(), tmp_path / "w.safetensors")


@pytest.mark.parametrize("ending", [".bin", ".safetensors"])
def test_a_missing_shard_is_a_file_not_found_error(tmp_path: Path, ending: str) -> None:
    index = {"weight_map": dict.fromkeys(net().state_dict(), f"shard{ending}")}
    (tmp_path / f"model{ending}.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="shard") as caught:
        load_checkpoint_in_model(net(), tmp_path)
    assert isinstance(caught.value, ConfigurationError)


def test_a_broken_torch_file_is_named(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "w.bin")
    whole = (tmp_path / "w.bin").read_bytes()
    (tmp_path / "w.bin").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"w\.bin.*cannot be read"):
        load_checkpoint_in_model(net(), tmp_path / "w.bin")


def with_norm(**kwargs: str) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, **kwargs), nn.BatchNorm1d(4, **kwargs), nn.Linear(4, 5, **kwargs))


def save(model: nn.Module, path: Path) -> Path:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save(state, path) if path.suffix == ".bin" else save_file(state, path)
    return path


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_value_that_is_not_a_tensor_is_told(place: str, tmp_path: Path) -> None:
    torch.save(net().state_dict() | {"0.weight": "heavy"}, tmp_path / "w.bin")
    with pytest.raises(ValueError, match=r"w\.bin.*'heavy'.*'0\.weight'"):
        load_checkpoint_in_model(net(), tmp_path / "w.bin", {"": place}, offload_folder=tmp_path / "o")


@pytest.mark.parametrize("name", ["w.bin", "w.safetensors"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_loaded_without_a_map(name: str, device: str, tmp_path: Path) -> None:
    source, target = with_norm(), with_norm(device=device)
    path = save(source, tmp_path / name)
    load_checkpoint_in_model(target, path, strict=True)
    path.unlink()
    assert all(torch.equal(value, source.state_dict()[key]) for key, value in target.state_dict().items())
    assert target[0].weight.requires_grad


def test_a_map_sends_weights_to_cpu_meta_and_disk(tmp_path: Path) -> None:
    source, target = with_norm(), with_norm(device="meta")
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
    state = {**with_norm().state_dict(), "extra": torch.ones(1)}
    del state["0.bias"]
    torch.save(state, tmp_path / "w.bin")
    with logged("'extra'"):
        load_checkpoint_in_model(with_norm(), tmp_path / "w.bin")
    with pytest.raises(ValueError, match=r"'extra'.*'0\.bias'") as caught:
        load_checkpoint_in_model(with_norm(), tmp_path / "w.bin", strict=True)
    assert isinstance(caught.value, RuntimeError)


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


@pytest.mark.parametrize(("name", "dtype"), [("w.bin", None), ("w.safetensors", torch.float16)])
def test_a_tied_weight_and_its_neighbors_are_converted_together(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    source, target = (nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))) for _ in range(2))
    for model in (source, target):
        model[2].weight = model[0].weight
    state = {key: value.clone() for key, value in source.state_dict().items() if key != "2.weight"}
    torch.save(state, tmp_path / name) if dtype is None else save_file(state, tmp_path / name)
    load_checkpoint_and_dispatch(target, tmp_path / name, {"": "disk"}, offload_folder=tmp_path / "o", dtype=dtype)
    inputs = torch.rand(1, 2, dtype=dtype)
    assert torch.equal(target(inputs), source.to(inputs.dtype)(inputs))


class Counted(nn.Module):
    """A layer that keeps something in its state dict that is no tensor."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(2, 2), count

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}])
def test_what_a_module_keeps_beside_its_tensors_is_loaded(device_map: dict[str, str] | None, tmp_path: Path) -> None:
    torch.save(nn.Sequential(Counted(3), Counted(4)).state_dict(), tmp_path / "w.bin")
    model = nn.Sequential(Counted(), Counted())
    load_checkpoint_in_model(model, tmp_path / "w.bin", device_map, offload_folder=tmp_path / "o", strict=True)
    assert [layer.count for layer in model] == [3, 4]
    assert load_state_dict(tmp_path / "w.bin", {"": "cpu"})["1._extra_state"] == {"count": 4}


def test_a_tie_that_a_checkpoint_does_not_have_is_left_as_it_is(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    before = model[0].weight.detach().clone()
    save_file({"0.bias": torch.ones(3), "1.bias": torch.ones(3)}, tmp_path / "w.safetensors")
    load_checkpoint_in_model(model, tmp_path / "w.safetensors")
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[1].bias, torch.ones(3))


def test_scales_of_weights_in_8_bits_go_to_the_disk_with_them(tmp_path: Path) -> None:
    weight, scales = torch.randint(-127, 127, (3, 3), dtype=torch.int8), torch.rand(3)
    save_file({"0.weight": weight, "0.SCB": scales, "0.bias": torch.ones(3)}, tmp_path / "w.safetensors")
    model = nn.Sequential(nn.Linear(3, 3, device="meta"))
    load_checkpoint_in_model(model, tmp_path / "w.safetensors", {"": "disk"}, offload_folder=tmp_path / "o")
    stored = OffloadedWeightsLoader(save_folder=tmp_path / "o")
    assert torch.equal(stored["0.weight"], weight)
    assert torch.equal(stored["0.SCB"], scales)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module, version: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    if version == 1:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore:When using ``NO_SHARD``")
def test_names_that_differ_from_a_sharded_model_are_told(version: int, broadcast: bool, tmp_path: Path) -> None:
    state = net().state_dict()
    files = {"a.safetensors": ["0.weight", "0.bias"], "b.safetensors": ["1.weight", "1.bias"]}

    def write(left_out: str | None = None, **more: torch.Tensor) -> None:
        for file, names in files.items():
            save_file({name: state[name] for name in names if name != left_out} | more, tmp_path / file)
        listed = {name: file for file, names in files.items() for name in (*names, *more) if name != left_out}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))

    def load(strict: bool) -> None:
        load_checkpoint_in_model(sharded(net(), version), tmp_path, strict=strict, broadcast_from_rank0=broadcast)

    write()
    load(strict=True)
    write(left_out="1.bias")
    with pytest.raises(ValueError, match=r"not in the checkpoint \['1.bias'\]"):
        load(strict=True)
    if version == 2:  # joined parameters of FSDP 1 cannot be filled in part
        load(strict=False)
    write(extra=torch.ones(1))
    with pytest.raises(ValueError, match=r"not in the model \['extra'\]"):
        load(strict=True)


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_model_with_tied_weights_needs_one_name_of_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    state = model.state_dict()
    del state["1.weight"]
    save_file(state, tmp_path / "w.safetensors")
    target = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    target[1].weight = target[0].weight
    load_checkpoint_in_model(sharded(target, 2), tmp_path / "w.safetensors", strict=True)
    assert torch.equal(target(torch.ones(1, 3)), model(torch.ones(1, 3)))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore:When using ``NO_SHARD``")
def test_a_sharded_model_takes_whole_tensors(version: int, broadcast: bool, tmp_path: Path) -> None:
    source = net()
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    target = sharded(net(), version)
    load_checkpoint_in_model(
        target, tmp_path / "w.safetensors", dtype="float32", strict=True, broadcast_from_rank0=broadcast
    )
    inputs = torch.rand(2, 3)
    assert torch.equal(target(inputs), source(inputs))  # which leaves the weights of FSDP 2 gathered
    other = net()
    torch.save(other.state_dict(), tmp_path / "w.bin")
    load_checkpoint_in_model(target, tmp_path / "w.bin", broadcast_from_rank0=broadcast)
    assert torch.equal(target(inputs), other(inputs))
