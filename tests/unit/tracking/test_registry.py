"""Which trackers a run uses, and how others are added."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerate._base.errors import ConfigurationError
from accelerate.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    LoggerType,
    TensorBoardTracker,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
    registry,
)


class Mine(GeneralTracker):
    name = "mine"
    requires_logging_directory = False

    @property
    def tracker(self) -> Any:
        return None


class MineInAFolder(Mine):
    name = "mine_in_a_folder"
    requires_logging_directory = True


@pytest.fixture(autouse=True)
def keep_the_table() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def test_every_name_but_all_has_a_class_of_that_name() -> None:
    assert set(LOGGER_TYPE_TO_CLASS) == {str(name) for name in LoggerType} - {"all"}
    assert all(tracker.name == name for name, tracker in LOGGER_TYPE_TO_CLASS.items())


def test_which_trackers_need_a_folder_and_which_act_everywhere() -> None:
    classes = LOGGER_TYPE_TO_CLASS.values()
    assert {tracker.name for tracker in classes if tracker.requires_logging_directory} == {"tensorboard", "aim"}
    assert {tracker.name for tracker in classes if not tracker.main_process_only} == {"wandb", "trackio", "swanlab"}


def test_available_trackers_are_a_fresh_list_in_the_known_order() -> None:
    found = get_available_trackers()
    assert LoggerType.TENSORBOARD in found
    order = ["tensorboard", "wandb", "comet_ml", "aim", "mlflow", "clearml", "dvclive", "swanlab", "trackio"]
    assert [str(name) for name in found] == [name for name in order if LoggerType(name) in found]
    found.clear()
    assert get_available_trackers()


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_no_tracker(nothing: Any) -> None:
    assert filter_trackers(nothing) == []


@pytest.mark.parametrize(
    "given", ["tensorboard", LoggerType.TENSORBOARD, ["tensorboard", LoggerType.TENSORBOARD], ("tensorboard",)]
)
def test_a_name_in_any_form_and_once(given: Any) -> None:
    assert filter_trackers(given, "runs") == [LoggerType.TENSORBOARD]


def test_instances_come_first_each_once_and_need_no_folder() -> None:
    first, second = Mine(), MineInAFolder()
    assert filter_trackers(["tensorboard", first, second, first], "runs") == [first, second, LoggerType.TENSORBOARD]
    assert filter_trackers(second) == [second]


def test_all_is_the_instances_and_every_installed_tracker() -> None:
    mine = Mine()
    assert filter_trackers(["all", mine, "tensorboard"], "runs") == [mine, *get_available_trackers()]
    assert filter_trackers(LoggerType.ALL, "runs") == get_available_trackers()


def test_all_without_a_folder_leaves_out_those_that_need_one() -> None:
    assert LoggerType.TENSORBOARD not in filter_trackers("all")


@pytest.mark.parametrize("wrong", ["tensorbord", "TensorBoard", Mine, 3])
def test_what_is_no_tracker_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"log_with has .* neither the name nor an instance") as caught:
        filter_trackers([wrong], "runs")
    assert repr(wrong) in str(caught.value)


def test_a_tracker_that_needs_a_folder_says_so() -> None:
    with pytest.raises(ConfigurationError, match="log_with has 'tensorboard' and logging_dir is None"):
        filter_trackers("tensorboard")


def test_a_package_that_is_not_installed_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    name, tracker, _ = registry._BUILT_IN[0]
    monkeypatch.setattr(registry, "_BUILT_IN", ((name, tracker, lambda: False), *registry._BUILT_IN[1:]))
    with pytest.warns(UserWarning, match="log_with has 'tensorboard', whose package is not installed"):
        assert filter_trackers("tensorboard", "runs") == []


def test_a_registered_class_is_chosen_by_its_name() -> None:
    with pytest.raises(ConfigurationError):
        filter_trackers("mine")
    register_tracker_class(Mine)
    register_tracker_class(MineInAFolder)
    assert filter_trackers("mine") == ["mine"]
    assert filter_trackers(["mine", "mine_in_a_folder"], "runs") == ["mine", "mine_in_a_folder"]
    with pytest.raises(ConfigurationError, match="'mine_in_a_folder'"):
        filter_trackers("mine_in_a_folder")


def test_taking_the_name_of_another_class_warns_and_wins() -> None:
    class Board(Mine):
        name = "tensorboard"

    with pytest.warns(UserWarning, match="The tracker 'tensorboard' was TensorBoardTracker and is from now on"):
        register_tracker_class(Board)
    assert filter_trackers("tensorboard") == [LoggerType.TENSORBOARD]  # no folder: it is the new class that is asked
    assert LOGGER_TYPE_TO_CLASS["tensorboard"] is Board is not TensorBoardTracker


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (int, "is not a class derived from GeneralTracker"),
        (Mine(), "is not a class derived from GeneralTracker"),
        (type("Empty", (Mine,), {"name": ""}), "name=''"),
        (GeneralTracker, "requires_logging_directory=None"),
    ],
)
def test_a_class_that_cannot_be_registered(wrong: Any, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        register_tracker_class(wrong)


def test_an_installed_package_adds_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "tracker_of_others-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tracker-of-others\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[accelerate.trackers]\nother = tracker_of_others:OtherTracker\n")
    (tmp_path / "tracker_of_others.py").write_text(
        textwrap.dedent(
            """
            from accelerate.tracking import GeneralTracker

            class OtherTracker(GeneralTracker):
                name = "other"
                requires_logging_directory = False
                tracker = None
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry._load_plugins.cache_clear()
    assert filter_trackers("other") == ["other"]
    assert LOGGER_TYPE_TO_CLASS["other"].__module__ == "tracker_of_others"
