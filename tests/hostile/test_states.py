"""States in untrusted checkpoints: values that no run can have are refused before anything changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import forget_inherited_state
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError


def optimizer_with(state: dict[int, Any]) -> dict[str, Any]:
    return {"state": state, "param_groups": [{"params": [0, 1], "lr": 0.1}]}


class TestStates:
    """Files of a checkpoint that hold other data than a run writes."""

    def prepared(self) -> tuple[Accelerator, torch.nn.Module, Any]:
        forget_inherited_state()
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(TensorDataset(torch.ones(8, 2)))
        model, _, schedule, _ = accelerator.prepare(model, optimizer, schedule, loader)
        return accelerator, model, schedule

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("scheduler.bin", 5),
            ("scheduler.bin", {"step": 5}),
            ("scheduler.bin", {"optimizer": 5}),
            ("scheduler.bin", {"last_epoch": "x"}),
            ("scheduler.bin", {"base_lrs": 5}),
            ("scheduler.bin", {7: 5}),
            ("optimizer.bin", 5),
            ("optimizer.bin", {}),
            ("optimizer.bin", {"state": {}, "param_groups": [5]}),
            ("optimizer.bin", {"state": {0: 5}, "param_groups": [{"params": [0, 1]}]}),
            ("optimizer.bin", {"state": {}, "param_groups": [{"params": [0, 1], "lr": "0.1"}]}),
            ("optimizer.bin", {"state": {}, "param_groups": [{"params": [0, 1], "lr": 1j}]}),
            ("optimizer.bin", {"state": {}, "param_groups": [{"params": [0, 1], "lr": float("nan")}]}),
            ("optimizer.bin", {"state": {}, "param_groups": [{"params": [0, 1], "lr": torch.ones(2)}]}),
            ("optimizer.bin", {"state": {}, "param_groups": [{"params": [0, 1]}]}),
            ("optimizer.bin", optimizer_with({0: {"momentum_buffer": torch.ones(3)}})),
            ("optimizer.bin", optimizer_with({0: {"momentum_buffer": "x"}})),
            ("optimizer.bin", optimizer_with({0: {"momentum_buffer": torch.ones(())}})),
            ("optimizer.bin", optimizer_with({2: {"momentum_buffer": torch.ones(2)}})),
            ("scheduler.bin", {"base_lrs": ["x"]}),
            ("loader.bin", 5),
            ("loader.bin", {"epoch": 0, "samples": 10**15}),
            ("loader.bin", {"epoch": 0, "samples": -1}),
            ("loader.bin", {"epoch": 10**15}),
            ("loader.bin", {"epoch": 0, "order": {"zz": 1}}),
            ("loader.bin", {"_accelerate": 5}),
            ("window_0.bin", {"share": {"index": 0, "count": 1}, "window": {}, "is_open": True, "gradients": 5}),
            ("progress.json", {"epoch": "x"}),
        ],
    )
    def test_are_refused_before_anything_changes(self, name: str, value: Any, tmp_path: Path) -> None:
        accelerator, model, schedule = self.prepared()
        accelerator.save_state(tmp_path / "state")
        (tmp_path / "state" / "manifest.json").unlink()
        path = tmp_path / "state" / name
        path.write_text(json.dumps(value)) if path.suffix == ".json" else torch.save(value, path)
        with torch.no_grad():
            model.weight.zero_()
        with pytest.raises(CheckpointError, match=rf"{name}' h(olds|as) .*(Use|use) another checkpoint"):
            accelerator.load_state(tmp_path / "state")
        assert not model.weight.any()
        schedule.get_last_lr()

    def test_what_other_releases_wrote_of_a_scheduler_is_taken(self, tmp_path: Path) -> None:
        accelerator, _, schedule = self.prepared()
        accelerator.save_state(tmp_path / "state")
        (tmp_path / "state" / "manifest.json").unlink()
        state = schedule.state_dict() | {"verbose": "deprecated", "_is_initial": None, "last_epoch": 3}
        del state["_last_lr"]
        torch.save(state, tmp_path / "state" / "scheduler.bin")
        accelerator.load_state(tmp_path / "state")
        assert schedule.scheduler.last_epoch == 3

    def test_an_object_that_does_not_take_its_state_is_told_with_what_that_means(self, tmp_path: Path) -> None:
        class Picky:
            def state_dict(self) -> dict[str, int]:
                return {}

            def load_state_dict(self, state: dict[str, int]) -> None:
                raise KeyError("a key")

        accelerator, _, _ = self.prepared()
        accelerator.register_for_checkpointing(Picky())
        accelerator.save_state(tmp_path / "state")
        with pytest.raises(CheckpointError, match=r"Picky \(registered object 0\).*KeyError.*half restored") as caught:
            accelerator.load_state(tmp_path / "state")
        assert isinstance(caught.value.__cause__, KeyError)

    def test_a_manifest_of_more_processes_than_there_are(self, tmp_path: Path) -> None:
        accelerator, _, _ = self.prepared()
        accelerator.save_state(tmp_path / "state")
        path = tmp_path / "state" / "manifest.json"
        content = json.loads(path.read_text()) | {"world_size": 2**62}
        del content["checksum"]
        path.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"manifest\.json' cannot be read .*more processes than any run has"):
            accelerator.load_state(tmp_path / "state")
