"""TensorBoard: what is logged is read back from its event files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.logs import logged

from accelerate.tracking import TensorBoardTracker, tensorboard


def read(folder: Path) -> Any:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


@pytest.fixture
def tracker(tmp_path: Path) -> TensorBoardTracker:
    made = TensorBoardTracker("run", tmp_path)
    made.start()
    return made


def test_nothing_is_written_before_the_start(tmp_path: Path) -> None:
    tracker = TensorBoardTracker("run", tmp_path)
    assert tracker.tracker is None
    assert list(tmp_path.iterdir()) == []
    tracker.start()
    assert tracker.logging_dir == str(tmp_path / "run")
    assert type(tracker.tracker).__name__ == "SummaryWriter"
    tracker.finish()


def test_numbers_are_read_back_exactly(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"loss": 0.5, "count": 3, "tensor": torch.tensor(0.25), "numpy": np.float32(1.5)}, step=1)
    tracker.log({"loss": 0.125, "tensor": torch.tensor([2.0])}, step=4)
    tracker.finish()
    assert scalars(tmp_path / "run", "loss") == [(1, 0.5), (4, 0.125)]
    assert scalars(tmp_path / "run", "tensor") == [(1, 0.25), (4, 2.0)]
    assert scalars(tmp_path / "run", "count") == [(1, 3.0)]
    assert scalars(tmp_path / "run", "numpy") == [(1, 1.5)]


def test_values_are_on_disk_before_the_end(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"loss": 0.5}, step=0)
    assert scalars(tmp_path / "run", "loss") == [(0, 0.5)]
    tracker.finish()


def test_text_and_groups(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log({"note": "hello", "losses": {"train": 1.0, "test": torch.tensor(2.0)}}, step=7)
    tracker.finish()
    (event,) = read(tmp_path / "run").Tensors("note/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (7, b"hello")
    assert scalars(tmp_path / "run" / "losses_train", "losses") == [(7, 1.0)]
    assert scalars(tmp_path / "run" / "losses_test", "losses") == [(7, 2.0)]


def test_what_cannot_be_recorded_is_named_and_the_rest_is_recorded(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    with logged("'many' is of type 'list' and the tracker 'tensorboard' records numbers"):
        tracker.log({"many": torch.tensor([1.0, 2.0]), "loss": 0.5}, step=0)
    tracker.finish()
    assert read(tmp_path / "run").Tags()["scalars"] == ["loss"]


def test_options_reach_the_writer(tmp_path: Path) -> None:
    tracker = TensorBoardTracker("run", tmp_path, filename_suffix=".mine")
    tracker.start()
    tracker.log({"loss": 0.5}, step=0, walltime=12.0)
    tracker.finish()
    assert [event.wall_time for event in read(tmp_path / "run").Scalars("loss")] == [12.0]
    assert [file.suffix for file in (tmp_path / "run").iterdir()] == [".mine"]


def test_images(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    tracker.log_images({"first": torch.zeros(2, 3, 4, 5)}, step=1)
    tracker.log_images({"last": np.zeros((2, 4, 5, 3), dtype=np.uint8)}, step=2, dataformats="NHWC")
    tracker.finish()
    events = read(tmp_path / "run")
    assert events.Tags()["images"] == ["first", "last"]
    (image,) = events.Images("last")
    assert (image.step, image.height, image.width) == (2, 4, 10)  # the writer puts a batch side by side


def test_settings_are_hyper_parameters_and_a_file(tracker: TensorBoardTracker, tmp_path: Path) -> None:
    settings = {"lr": 0.1, "steps": 3, "fused": True, "name": "x", "limit": None}
    tracker.store_init_configuration(settings | {"betas": (0.9, 0.95), "scale": torch.tensor(2.0)})
    tracker.finish()
    (file,) = (tmp_path / "run").glob("*/hparams.yml")
    assert yaml.safe_load(file.read_text()) == settings | {"betas": "(0.9, 0.95)", "scale": 2.0}
    (events,) = (tmp_path / "run").glob("*/events*")
    assert "_hparams_/session_start_info" in read(events.parent).summary_metadata


def test_tensorboardx_takes_the_place_of_a_missing_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Mock()
    monkeypatch.setitem(sys.modules, "tensorboardX", package)
    monkeypatch.setattr(tensorboard, "is_package_available", lambda name: name == "tensorboardX")
    tracker = TensorBoardTracker("run", tmp_path)
    tracker.start()
    assert tracker.tracker is package.SummaryWriter.return_value
