from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)


def test_the_state_of_a_run_goes_through_a_folder_of_the_programs_own(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model: Any = torch.nn.Linear(2, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loader: Any = torch.utils.data.DataLoader(torch.ones(4, 2))
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.step()
    schedule.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    written = save_accelerator_state(
        str(tmp_path / "state"), [model.state_dict()], [optimizer], [schedule], [loader], 0, 7, scaler
    )
    assert written == tmp_path / "state"
    drawn = torch.rand(1)
    torch.nn.init.zeros_(model.weight)
    optimizer.param_groups[0]["lr"] = 5.0
    scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})
    overrides = load_accelerator_state(written, [model], [optimizer], [schedule], [loader], 0, scaler, "on_device")
    assert overrides == {"step": 7}
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(model.weight, state["weight"])
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert scaler.get_scale() == 4.0
    with pytest.raises(TypeError, match="map_location"):
        load_accelerator_state(written, [model], [], [], [], 0, map_location="moon")


def test_an_object_goes_through_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    held = SimpleNamespace(state_dict=lambda: {"a": [1]}, load_state_dict=taken.append)
    save_custom_state(held, tmp_path, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["custom_checkpoint_2.pkl"]
    load_custom_state(held, tmp_path, 2)
    assert taken == [{"a": [1]}]
    held.state_dict = lambda: {"kind": SimpleNamespace(a=1)}
    save_custom_state(held, tmp_path, 2)
    with pytest.raises(RuntimeError, match="ACCELERATE_ALLOW_PICKLE=1"):
        load_custom_state(held, tmp_path, 2)
    monkeypatch.setenv("ACCELERATE_ALLOW_PICKLE", "1")
    load_custom_state(held, tmp_path, 2)
    assert taken[1:] == [{"kind": SimpleNamespace(a=1)}]
