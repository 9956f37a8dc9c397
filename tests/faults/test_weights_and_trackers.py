"""Faults of the disk that holds offloaded weights, weights that are saved, or the records of trackers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.disks import contents, fill_up, mounted, read_only
from tests.support.training import fresh_accelerator

from accelerate import disk_offload, load_checkpoint_in_model
from accelerate._base.errors import CheckpointError, UsageError
from accelerate.checkpointing.catalog import inspect
from accelerate.tracking import GeneralTracker


def network(value: float = 1.0) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def test_weights_on_a_disk_that_is_full_or_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=300k") as disk:
        accelerator = fresh_accelerator(cpu=True)
        accelerator.save_model(network(), disk / "model", max_shard_size="20KB")
        before = contents(disk)
        fill_up(disk)
        with pytest.raises(CheckpointError, match=r"No space left on device.*can still be read"):
            accelerator.save_model(network(2.0), disk / "model", max_shard_size="20KB")
        with pytest.raises(OSError, match="No space left on device"):
            disk_offload(network(), disk / "offload")
        (disk / "filler").unlink()
        shutil.rmtree(disk / "offload", ignore_errors=True)
        assert contents(disk) == before
        with read_only(disk):
            with pytest.raises(CheckpointError, match="Read-only file system"):
                accelerator.save_model(network(2.0), disk / "model")
            with pytest.raises(OSError, match="Read-only file system"):
                disk_offload(network(), disk / "offload")
            model = network(0.0)
            load_checkpoint_in_model(model, disk / "model")
            assert model[3].bias[0] == 1.0
        accelerator.save_model(network(3.0), disk / "model")
        load_checkpoint_in_model(model, disk / "model")
        assert model[0].weight[0, 0] == 3.0


def test_a_folder_of_offloaded_weights_that_vanishes_is_named(tmp_path: Path) -> None:
    model = network()
    disk_offload(model, tmp_path / "offload")
    rows = torch.ones(1, 64)
    expected = model(rows)
    (tmp_path / "offload").rename(tmp_path / "elsewhere")
    with pytest.raises((UsageError, ValueError), match=r"offload/\d\.(weight|bias)\.dat"):
        model(rows)
    (tmp_path / "elsewhere").rename(tmp_path / "offload")
    assert torch.equal(model(rows), expected)


class Lines(GeneralTracker):
    """A tracker that writes lines to a file, as many do."""

    name = "lines"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        Path(logging_dir).mkdir(parents=True, exist_ok=True)
        self.stream = Path(logging_dir, run_name).open("w", buffering=1)  # noqa: SIM115 - until `finish`

    @property
    def tracker(self) -> Any:
        return self.stream

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.stream.write(f"{step} {values}\n")

    def finish(self) -> None:
        self.stream.close()


def test_training_goes_on_when_its_record_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "disk", "size=100k") as disk:
        accelerator = fresh_accelerator(cpu=True, log_with=Lines("run", str(disk / "logs")))
        accelerator.init_trackers("run")
        accelerator.log({"loss": 1.0}, step=0)
        fill_up(disk)
        model = torch.nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(40):
            accelerator.backward(model(torch.ones(2, 2)).square().mean())
            optimizer.step()
            accelerator.log({"loss": float(step), "text": "x" * 500}, step=step)
        accelerator.save_state(tmp_path / "state")
        accelerator.end_training()
    assert accelerator.progress.step == 40
    assert "The tracker 'lines' failed to log; the run goes on" in caplog.text
    assert inspect(tmp_path / "state", checksums=True).is_valid
