"""One process reads a checkpoint, and the others get it from there."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.support.processes import run_group
from torch import nn

from accelerate import PartialState, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.offload.loading import load_checkpoint_in_model


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))


def load(source: str, own: str) -> list[dict[str, float]]:
    state = PartialState(cpu=True)
    # Only the first process is told of a folder that exists.
    checkpoint = source if state.process_index == 0 else f"{source}-not-here"
    found = []
    for dtype in (None, torch.bfloat16):
        with init_empty_weights():
            model = net().eval()
        load_checkpoint_in_model(model, checkpoint, {"": "cpu"}, dtype=dtype, strict=True, broadcast_from_rank0=True)
        found.append({name: float(value.double().sum()) for name, value in model.state_dict().items()})
    with init_empty_weights():
        model = net().eval()
    folder = f"{own}/{state.process_index}"
    load_checkpoint_and_dispatch(
        model, checkpoint, {"0": "cpu", "1": "cpu", "2": "disk"}, offload_folder=folder, broadcast_from_rank0=True
    )
    found.append({"output": float(model(torch.ones(2, 30)).detach().double().sum())})
    return found


def test_the_first_process_reads_for_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net().eval()
    names = list(model.state_dict())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    results = run_group(load, 2, str(tmp_path), str(tmp_path / "offload"))
    assert results[0] == results[1]
    plain, small, output = results[0]
    assert list(plain) == names
    assert plain == {name: float(value.double().sum()) for name, value in model.state_dict().items()}
    assert small["0.weight"] == float(model[0].weight.detach().bfloat16().double().sum())
    assert output["output"] == float(model(torch.ones(2, 30)).detach().double().sum())


class Counted(nn.Linear):
    """A layer that keeps something in its state dict that is no tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def load_counted(source: str) -> tuple[int, float]:
    state = PartialState(cpu=True)
    model = Counted(2, 2)
    checkpoint = source if state.process_index == 0 else f"{source}-not-here"
    load_checkpoint_in_model(model, checkpoint, strict=True, broadcast_from_rank0=True)
    return model.count, float(model.weight.detach().sum())


def test_what_is_no_tensor_is_sent_too(tmp_path: Path) -> None:
    model = Counted(2, 2)
    model.count = 7
    torch.save(model.state_dict(), tmp_path / "w.bin")
    assert run_group(load_counted, 2, str(tmp_path / "w.bin")) == [(7, float(model.weight.detach().sum()))] * 2
