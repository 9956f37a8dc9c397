"""The Accelerator's trackers, on one process and on two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.support.processes import run_group

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TensorBoardTracker, register_tracker_class
from accelerate.tracking.base import BlankTracker


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.calls: list[Any] = [("made", args, kwargs)]

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(("settings", values))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append(("log", values, step, kwargs))

    def finish(self) -> None:
        self.calls.append("finish")


class FolderRecorder(Recorder):
    name = "folder_recorder"
    requires_logging_directory = True


class Breaking(Recorder):
    """A tracker that fails to do some things."""

    name = "breaking"

    def __init__(self, *breaks: str) -> None:
        super().__init__()
        self.breaks = breaks or ("finish",)

    def start(self) -> None:
        self.try_to("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.try_to("settings")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.try_to("log")

    def finish(self) -> None:
        self.try_to("finish")

    def try_to(self, action: str) -> None:
        self.calls.append(action)
        if action in self.breaks:
            raise OSError("the disk is full")


@pytest.fixture(autouse=True)
def keep_the_table() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def test_a_whole_run_with_tensorboard(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.5}, init_kwargs={"tensorboard": {"flush_secs": 5}})
    for step in range(3):
        accelerator.log({"loss": 1 / 2**step}, step=step)
    tracker = accelerator.get_tracker("tensorboard")
    assert isinstance(tracker, TensorBoardTracker)
    assert tracker.init_kwargs == {"flush_secs": 5}
    assert accelerator.get_tracker("tensorboard", unwrap=True) is tracker.writer
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "digits"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert len(list((tmp_path / "digits").glob("*/hparams.yml"))) == 1


def test_arguments_reach_each_tracker(tmp_path: Path) -> None:
    register_tracker_class(Recorder)
    register_tracker_class(FolderRecorder)
    own = Recorder("own")
    accelerator = Accelerator(cpu=True, log_with=["recorder", own, "folder_recorder"], project_dir=tmp_path)
    accelerator.init_trackers("project", {"lr": 1}, {"recorder": {"a": 1}, "folder_recorder": {"b": 2}})
    accelerator.log({"x": 1}, step=3, log_kwargs={"folder_recorder": {"c": 4}})
    accelerator.log({"x": 2})
    accelerator.end_training()
    middle = ["start", ("settings", {"lr": 1}), ("log", {"x": 1}, 3, {}), ("log", {"x": 2}, None, {}), "finish"]
    in_folder = [*middle[:2], ("log", {"x": 1}, 3, {"c": 4}), *middle[3:]]
    assert [tracker.tracker for tracker in accelerator.trackers] == [
        [("made", ("own",), {}), *middle],
        [("made", ("project",), {"a": 1}), *middle],
        [("made", ("project", str(tmp_path)), {"b": 2}), *in_folder],
    ]


def test_a_second_call_of_init_trackers_does_not_start_an_instance_twice() -> None:
    own = Recorder()
    accelerator = Accelerator(cpu=True, log_with=own)
    accelerator.init_trackers("one")
    accelerator.init_trackers("two", {"lr": 1})
    assert accelerator.trackers == [own]
    assert own.calls.count("start") == 1


def test_a_second_run_after_the_end_starts_anew() -> None:
    register_tracker_class(Recorder)
    accelerator = Accelerator(cpu=True, log_with="recorder")
    accelerator.init_trackers("one")
    accelerator.end_training()
    accelerator.end_training()
    (first,) = accelerator.trackers
    assert first.tracker.count("finish") == 1
    accelerator.init_trackers("two")
    accelerator.log({"x": 1})
    accelerator.end_training()
    (second,) = accelerator.trackers
    assert first.tracker[-1] == "finish"
    assert second.tracker == [("made", ("two",), {}), "start", ("log", {"x": 1}, None, {}), "finish"]


def test_get_tracker_names_what_there_is() -> None:
    accelerator = Accelerator(cpu=True, log_with=Recorder())
    assert isinstance(accelerator.get_tracker("recorder"), BlankTracker)
    accelerator.init_trackers("project")
    with pytest.raises(ConfigurationError, match=r"no tracker 'wandb' in this run: it records with 'recorder'"):
        accelerator.get_tracker("wandb")


def test_without_trackers_every_call_is_allowed() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"x": 1})
    assert accelerator.get_tracker("wandb", unwrap=True).log_artifact("file") is None
    accelerator.end_training()


@pytest.mark.usefixtures("signals_come_back")
def test_all_trackers_are_closed_when_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    last = Recorder()
    accelerator = Accelerator(cpu=True, log_with=[Breaking(), last])
    accelerator.init_trackers("project")
    # A run that was trained, or stops to go on later, is no failure for that.
    with pytest.raises(SystemExit) as left:
        accelerator.exit_for_restart()
    assert left.value.code == 75
    assert last.calls[-1] == "finish"
    assert "The tracker 'breaking' failed to finish" in caplog.text


def test_a_tracker_that_fails_to_log_stops_neither_training_nor_the_others(caplog: pytest.LogCaptureFixture) -> None:
    broken, whole = Breaking("settings", "log"), Recorder()
    accelerator = Accelerator(cpu=True, log_with=[broken, whole])
    accelerator.init_trackers("project", {"lr": 1})
    for step in range(3):
        accelerator.log({"x": step}, step=step)
    accelerator.end_training()
    assert whole.calls[1:] == [
        "start",
        ("settings", {"lr": 1}),
        *(("log", {"x": step}, step, {}) for step in range(3)),
        "finish",
    ]
    # It is tried again each time, and reported once for each thing that it fails to do.
    assert broken.calls[1:] == ["start", "settings", "log", "log", "log", "finish"]
    reports = [record.getMessage() for record in caplog.records]
    assert [report.partition(";")[0] for report in reports] == [
        "The tracker 'breaking' failed to record the settings",
        "The tracker 'breaking' failed to log",
    ]
    assert all("the disk is full" in str(record.exc_info) for record in caplog.records)


def test_a_tracker_that_cannot_start_is_left_out_beside_others(caplog: pytest.LogCaptureFixture) -> None:
    whole = Recorder()
    accelerator = Accelerator(cpu=True, log_with=[Breaking("start"), whole])
    accelerator.init_trackers("project")
    assert accelerator.trackers == [whole]
    assert "The tracker 'breaking' failed to start" in caplog.text
    accelerator.get_tracker("breaking").log_images({"picture": None})  # a stand-in, so that the program goes on
    accelerator.log({"x": 1})
    accelerator.end_training()
    assert whole.calls[1:] == ["start", ("log", {"x": 1}, None, {}), "finish"]


def test_a_run_that_no_tracker_can_record_says_so_at_once() -> None:
    accelerator = Accelerator(cpu=True, log_with=Breaking("start"))
    with pytest.raises(OSError, match="the disk is full"):
        accelerator.init_trackers("project")


def _run_on_two() -> dict[str, Any]:
    import torch.distributed as dist

    own = Recorder()
    accelerator = Accelerator(cpu=True, log_with=own)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"x": 1}, step=0)
    accelerator.get_tracker("recorder").log({"y": accelerator.process_index})
    kind = type(accelerator.get_tracker("recorder")).__name__
    joined = dist.is_initialized()
    accelerator.end_training()
    left = not dist.is_initialized()
    accelerator.init_trackers("again")
    accelerator.end_training()
    return {"calls": own.calls[1:], "kind": kind, "joined": joined, "left": left}


def _record_before_the_run(folder: Path) -> bool:
    own = TensorBoardTracker("run", logging_dir=folder / os.environ["RANK"])  # nobody knows of a group yet
    accelerator = Accelerator(cpu=True, log_with=own)
    accelerator.init_trackers("project", {"lr": 1})
    accelerator.log({"x": accelerator.process_index + 1}, step=0)
    accelerator.end_training()
    return accelerator.is_main_process


def _end_with_a_failure() -> str:
    accelerator = Accelerator(cpu=True, log_with=Breaking())
    accelerator.init_trackers("project")
    try:
        accelerator.end_training()
    except OSError as error:
        return str(error)
    return "ended"


@pytest.mark.multiprocess
def test_two_processes_record_once_and_leave_the_group() -> None:
    main, other = run_group(_run_on_two, 2)
    first_run = ["start", ("settings", {"lr": 1}), ("log", {"x": 1}, 0, {}), ("log", {"y": 0}, None, {}), "finish"]
    assert main == {"calls": [*first_run, "start", "finish"], "kind": "Recorder", "joined": True, "left": True}
    assert other == {"calls": [], "kind": "BlankTracker", "joined": True, "left": True}


@pytest.mark.multiprocess
def test_a_tracker_made_before_the_accelerator_records_on_the_main_process_alone(tmp_path: Path) -> None:
    assert run_group(_record_before_the_run, 2, tmp_path) == [True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    events = EventAccumulator(str(tmp_path / "0" / "run")).Reload()
    assert [event.value for event in events.Scalars("x")] == [1.0]


@pytest.mark.multiprocess
def test_a_tracker_that_fails_does_not_hold_up_the_other_process() -> None:
    assert run_group(_end_with_a_failure, 2) == ["ended", "ended"]
