"""Files that one process writes, and that run no code when they are read."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from tests.support.processes import run_group

from accelerate import Accelerator, PartialState
from accelerate._base.errors import WrongTypeError
from accelerate.checkpointing.files import load, save
from accelerate.offload.safetensors_format import clean_state_dict_for_safetensors


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
    with pytest.warns(UserWarning, match=r"first name only: \['1.weight'\]"):
        Accelerator().save(state, tmp_path / "model.safetensors", safe_serialization=True)
    found = load_file(tmp_path / "model.safetensors")
    assert list(found) == ["0.weight"]
    assert torch.equal(found["0.weight"], model[0].weight)
    assert list(state) == ["0.weight", "1.weight"]  # the caller's own stays whole


def test_parts_of_one_memory_are_all_saved(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"first": whole[0], "second": whole[1], "turned": whole.T, "whole": whole, "none": torch.empty(0)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(state, tmp_path / "parts.safetensors", safe_serialization=True)
    found = load_file(tmp_path / "parts.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_cleaning_happens_in_place() -> None:
    whole = torch.arange(4.0).reshape(2, 2)
    state: dict[str, Any] = {"turned": whole.T, "word": "kept"}
    assert clean_state_dict_for_safetensors(state) is state
    assert state["turned"].is_contiguous()
    assert state["word"] == "kept"


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
