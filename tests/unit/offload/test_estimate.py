"""Tensors are listed without reading them, and the estimates follow their formulae to the byte."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.offload.estimate import (
    ModelTensors,
    TensorInfo,
    TrainingMemory,
    in_layout,
    layer_of,
    per_rank,
    plan_report,
    read_tensors,
    tensors_of_model,
    training_memory,
)
from accelerate.offload.memory import calculate_maximum_sizes
from accelerate.offload.weight_files import find_weight_files

# 10*4 + 2*(3*5 + 5) = 80 floating-point elements and 7 integers of 8 bytes.
TENSORS = {
    "wte.weight": torch.zeros(10, 4),
    "h.0.weight": torch.zeros(3, 5, dtype=torch.bfloat16),
    "h.0.bias": torch.zeros(5),
    "h.1.weight": torch.zeros(3, 5, dtype=torch.float16),
    "h.1.bias": torch.zeros(5, dtype=torch.float8_e4m3fn),
    "position_ids": torch.zeros(7, dtype=torch.int64),
}
STORED = 40 * 4 + 15 * 2 + 5 * 4 + 15 * 2 + 5 * 1 + 7 * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def model_at(path: Path) -> ModelTensors:
    return ModelTensors(tuple(read_tensors(find_weight_files(path))))


def write_header(path: Path, header: Any) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def check_sizes(model: ModelTensors) -> None:
    assert model.parameters == 80
    assert model.stored_bytes == STORED
    assert {dtype: model.total(dtype) for dtype in ("float32", "float16", "bfloat16", "int8")} == {
        "float32": 80 * 4 + 56,
        "float16": 80 * 2 + 56,
        "bfloat16": 80 * 2 + 56,
        "int8": 80 + 56,
    }
    # Each tensor takes whole bytes: 20 + 8 + 3 + 8 + 3.
    assert model.total("int4") == 42 + 56
    largest = model.largest_layer("float32")
    assert (largest.name, largest.bytes) == ("wte", 160)
    assert model.largest_layer("int8").name == "position_ids"


def test_a_folder_is_counted_to_the_byte(folder: Path) -> None:
    check_sizes(model_at(folder))


def test_nothing_after_the_header_is_needed(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    file.write_bytes(content[: 8 + length])
    check_sizes(model_at(file))


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    parts = {"a.safetensors": list(TENSORS)[:3], "b.safetensors": list(TENSORS)[3:]}
    for file, names in parts.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, names in parts.items() for name in names}}))
    check_sizes(model_at(tmp_path))
    check_sizes(model_at(index))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"b\.safetensors.*1 of 2"):
        model_at(tmp_path)


def test_files_of_torch_are_read_too_and_count_tied_weights_once(tmp_path: Path) -> None:
    torch.save({**TENSORS, "head.weight": TENSORS["wte.weight"]}, tmp_path / "pytorch_model.bin")
    check_sizes(model_at(tmp_path))
    # The format before torch 1.6, which had no 8-bit numbers.
    old = {name: tensor for name, tensor in TENSORS.items() if tensor.dtype != torch.float8_e4m3fn}
    torch.save({"state_dict": old, "epoch": 3}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert model_at(tmp_path / "old.pt").total("float32") == 75 * 4 + 56


def test_safetensors_come_before_files_of_torch(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    assert [file.name for file in find_weight_files(folder)] == ["model.safetensors"]


def test_a_folder_with_several_files_and_no_index_is_not_guessed(tmp_path: Path) -> None:
    for name in ("first", "second"):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigurationError, match=r"2 \.safetensors files"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "length of a header"),
        (b"not safetensors at all", "length of a header"),
        (struct.pack("<Q", 100) + b"{}", "ends after 2"),
        ([1, 2], "'list'"),
        (b"{", "a safetensors header"),
        (b"\xff\xfe\xfd", "a safetensors header"),
        ({"a": {"dtype": "F32"}}, "'a' no shape"),
        ({"a": {"dtype": "F32", "shape": [2, -1]}}, "'a' no shape"),
        ({"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, "'F33'"),
        ({"a": 3}, "'a' no shape"),
    ],
)
def test_a_broken_header_is_named(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "model.safetensors"
    if isinstance(content, bytes) and content not in {b"{", b"\xff\xfe\xfd"}:
        file.write_bytes(content)
    else:
        write_header(file, content)
    with pytest.raises(ConfigurationError, match=message):
        model_at(file)


def test_code_in_a_file_of_torch_is_not_run(tmp_path: Path) -> None:
    torch.save({"a": TrainingMemory(1, 2, 3)}, tmp_path / "model.bin")
    with pytest.raises(ConfigurationError, match=r"model\.bin"):
        model_at(tmp_path)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.7.weight", "model.layers.3"),
        ("transformer.wte.weight", "transformer.wte"),
        ("scale", "scale"),
        ("blocks.0", "blocks"),
    ],
)
def test_the_layer_of_a_tensor_is_known_by_its_name(name: str, layer: str) -> None:
    assert layer_of(name) == layer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)


class Net(nn.Module):
    def __init__(self, whole: list[str]) -> None:
        super().__init__()
        self._no_split_modules = whole
        self.scale = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.blocks[0].first.weight


@pytest.mark.parametrize("whole", [["Block"], []])
def test_a_model_agrees_with_the_sizes_of_its_modules(whole: list[str]) -> None:
    net = Net(whole)
    model = ModelTensors(tuple(tensors_of_model(net)))
    total, (largest, names) = calculate_maximum_sizes(net)
    assert model.total("float32") == total
    assert model.largest_layer("float32").bytes == largest
    assert model.largest_layer("float32").name in names
    assert model.parameters == sum(parameter.numel() for parameter in net.parameters())


def test_training_adds_gradients_and_two_moments(folder: Path) -> None:
    model = model_at(folder)
    assert training_memory(model, "float32") == TrainingMemory(weights=320 + 56, gradients=320, optimizer=640)
    assert training_memory(model, "bfloat16") == TrainingMemory(320 + 56, 320, 640, working=160)
    assert training_memory(model, "int8") is None


def test_each_way_of_sharing_follows_its_formula(folder: Path) -> None:
    model = model_at(folder)
    # The first of 3 ranks holds ceil(rows / 3) rows of each: 4*4 + 1*5 + 2 + 1*5 + 2 elements.
    fsdp = 30
    # ZeRO cuts 80 elements, filled up to 81; stage 3 each by itself: 14 + 5 + 2 + 5 + 2.
    zero, zero3 = 27, 28
    layer = 40
    assert per_rank(model, "float32", 3) == {
        "DDP": TrainingMemory(320 + 56, 320, 640, working=320),
        "FSDP": TrainingMemory(4 * fsdp + 56, 4 * fsdp, 8 * fsdp, working=8 * layer),
        "ZeRO-1": TrainingMemory(320 + 56, 320, 12 * zero, working=4 * zero),
        "ZeRO-2": TrainingMemory(320 + 56, 4 * zero, 12 * zero, working=4 * zero),
        "ZeRO-3": TrainingMemory(4 * zero3 + 56, 4 * zero3, 12 * zero3, working=4 * (80 + layer)),
    }
    assert per_rank(model, "float16", 3) == {
        "DDP": TrainingMemory(320 + 56, 320, 640, working=320 + 160),
        "FSDP": TrainingMemory(4 * fsdp + 56, 4 * fsdp, 8 * fsdp, working=4 * layer),
        "ZeRO-1": TrainingMemory(160 + 56, 160, 12 * zero, working=8 * zero - 160),
        "ZeRO-2": TrainingMemory(160 + 56, 2 * zero, 12 * zero, working=6 * zero),
        "ZeRO-3": TrainingMemory(2 * zero3 + 56, 2 * zero3, 12 * zero3, working=2 * (80 + layer)),
    }
    assert per_rank(model, "float16", 3)["ZeRO-2"].total == 216 + 54 + 324 + 162


def test_zero_3_gathers_and_steps_a_large_model_in_portions() -> None:
    layers = [TensorInfo(f"{index}.weight", (1_000_000_000,), 32, True, True, str(index)) for index in range(6)]
    model = ModelTensors(tuple(layers))
    # Half of the reuse distance and a layer; or what a step of 1e9 elements makes of their gradients.
    assert per_rank(model, "float32", 100)["ZeRO-3"].working == 4 * 1_500_000_000
    assert per_rank(model, "bfloat16", 2)["ZeRO-3"].working == 6 * 1_000_000_000


def test_one_process_sends_nothing(folder: Path) -> None:
    model = model_at(folder)
    assert per_rank(model, "float32", 1)["DDP"] == training_memory(model, "float32")


def test_buffers_are_not_trained(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(4)
    save_file(norm.state_dict(), tmp_path / "model.safetensors")
    for model in (ModelTensors(tuple(tensors_of_model(norm))), model_at(tmp_path)):
        assert model.parameters == 8
        # Two statistics of 4 elements and a counter of 8 bytes stay whole on each rank.
        assert per_rank(model, "float32", 4)["FSDP"].weights == 2 * 4 + 32 + 8


@pytest.mark.parametrize(("dtype", "processes"), [("float32", 0), ("int8", 2)])
def test_what_cannot_be_trained_is_refused(folder: Path, dtype: str, processes: int) -> None:
    with pytest.raises(ConfigurationError, match=r"num_processes=0|'int8'"):
        per_rank(model_at(folder), dtype, processes)


def test_splitting_cuts_matrices_and_sharding_cuts_what_is_left() -> None:
    model = ModelTensors(tuple(tensors_of_model(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)))))
    # 48 numbers in the matrix, 18 in vectors; statistics of 12 numbers and a counter are not trained.
    untrained = 12 * 4 + 8
    assert in_layout(model, "float32") == training_memory(model, "float32")
    assert in_layout(model, "float32", tp=2) == TrainingMemory(42 * 4 + untrained, 42 * 4, 2 * 42 * 4)
    assert in_layout(model, "float32", fsdp=2, tp=2).weights == (12 + 9) * 4 + untrained
    assert in_layout(model, "float32", fsdp=2) == per_rank(model, "float32", 2)["FSDP"]
    assert in_layout(model, "bfloat16", tp=2).working == 42 * 2


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", {"tp": 0}), ("float32", {"fsdp": -1}), ("int8", {"tp": 2})])
def test_a_layout_that_cannot_train_is_refused(dtype: str, sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        in_layout(ModelTensors(()), dtype, **sizes)


def test_of_several_files_the_one_with_the_usual_name_is_the_model(tmp_path: Path) -> None:
    for name in ("ema", "model"):
        save_file({"a": torch.zeros(3)}, tmp_path / f"{name}.safetensors")
    assert find_weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_a_file_of_torch_without_tensors_is_told(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "w.bin")
    with pytest.raises(ConfigurationError, match=r"w\.bin' holds no tensors by name, but 'dict'.*a state dict"):
        model_at(tmp_path)


def test_rows_of_a_plan_join_where_the_numbers_follow() -> None:
    layers = nn.ModuleDict({key: nn.Linear(2, 2) for key in "0134a5"})
    model = ModelTensors(tuple(tensors_of_model(nn.ModuleDict({"h": layers, "head": nn.Linear(2, 2)}))))
    rows = plan_report(model, {0: 130, "cpu": 10_000})
    assert [(row.modules, row.place) for row in rows] == [
        ("h.0-1", 0),
        ("h.3-4", 0),
        ("h.a", "cpu"),
        ("h.5", "cpu"),
        ("head", "cpu"),
    ]
