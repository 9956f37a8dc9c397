"""What each tracker asks of its package, with a stand-in for the package that notes the calls."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from tests.support.logs import logged

from accelerate._base.errors import ConfigurationError
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

SETTINGS = {"lr": 0.1, "name": "x"}
VALUES = {"loss": 0.5, "tensor": torch.tensor(0.25), "numpy": np.float32(1.5)}
PLAIN = {"loss": 0.5, "tensor": 0.25, "numpy": 1.5}


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def started(name: str, *args: Any, **kwargs: Any) -> Any:
    tracker: GeneralTracker = LOGGER_TYPE_TO_CLASS[name](*args, **kwargs)
    tracker.start()
    return tracker


@pytest.mark.parametrize("repository", ["logs", None])
def test_aim(monkeypatch: pytest.MonkeyPatch, repository: str | None) -> None:
    run, image = Mock(__setitem__=Mock()), Mock(return_value="an image")
    opened = Mock(return_value=run)
    install(monkeypatch, "aim", Run=opened, Image=image)
    tracker = started("aim", "project", repository, experiment="e")
    assert opened.mock_calls[0] == call(repo=repository, experiment="e")
    assert (tracker.tracker, run.name) == (run, "project")
    tracker.store_init_configuration(SETTINGS)
    run.__setitem__.assert_called_once_with("hparams", SETTINGS)
    tracker.log(VALUES, step=3, epoch=1)
    assert run.track.mock_calls == [call(value, name=key, step=3, epoch=1) for key, value in PLAIN.items()]
    run.track.reset_mock()
    options = {"aim_image": {"quality": 90}, "track": {"epoch": 1}}
    tracker.log_images({"with": ("pixels", "a caption"), "without": "pixels"}, step=4, kwargs=options)
    assert image.mock_calls == [
        call("pixels", caption="a caption", quality=90),
        call("pixels", caption="", quality=90),
    ]
    assert run.track.mock_calls == [call("an image", name=name, step=4, epoch=1) for name in ("with", "without")]
    tracker.finish()
    run.close.assert_called_once_with()


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, {"project_name": "project", "task_name": "project"}),
        ({"CLEARML_PROJECT": "p", "CLEARML_TASK": "t"}, {"project_name": "p", "task_name": "t"}),
    ],
)
def test_clearml_opens_a_task_and_closes_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], names: dict[str, str]
) -> None:
    task_class = Mock()
    task_class.current_task.return_value = None
    install(monkeypatch, "clearml", Task=task_class)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracker = started("clearml", "project", reuse_last_task_id=False)
    task_class.init.assert_called_once_with(**names, reuse_last_task_id=False)
    task = tracker.tracker
    assert task is task_class.init.return_value
    tracker.store_init_configuration(SETTINGS)
    task.connect_configuration.assert_called_once_with(SETTINGS)
    tracker.finish()
    task.close.assert_called_once_with()


def clearml_task(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Mock]:
    task_class = Mock()
    install(monkeypatch, "clearml", Task=task_class)
    return started("clearml"), task_class


def test_clearml_takes_the_open_task_and_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, task_class = clearml_task(monkeypatch)
    assert tracker.tracker is task_class.current_task.return_value
    tracker.finish()
    assert not task_class.init.called
    assert not tracker.tracker.close.called


def test_clearml_names_plots_and_series(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, _ = clearml_task(monkeypatch)
    logger = tracker.tracker.get_logger.return_value
    tracker.log({"final": torch.tensor(2.0)})
    assert logger.mock_calls == [call.report_single_value(name="final", value=2.0)]
    logger.reset_mock()
    tracker.log({"eval_loss": 1.0, "rate": 2.0, "train_": 3.0}, step=5)
    tracker.log_images({"test_picture": "pixels"}, step=6)
    assert logger.mock_calls == [
        call.report_scalar(title="loss", series="eval", value=1.0, iteration=5),
        call.report_scalar(title="rate", series="train", value=2.0, iteration=5),
        call.report_scalar(title="train_", series="train", value=3.0, iteration=5),
        call.report_image(title="picture", series="test", iteration=6, image="pixels"),
    ]


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({"dataframe": "a frame"}, "a frame"),
        ({"columns": ["a"], "data": [[1], [2]]}, [["a"], [1], [2]]),
        ({"data": [[1]]}, [[1]]),
    ],
)
def test_clearml_takes_tables_in_three_forms(monkeypatch: pytest.MonkeyPatch, given: Any, rows: Any) -> None:
    tracker, _ = clearml_task(monkeypatch)
    tracker.log_table("eval_table", step=1, **given)
    tracker.tracker.get_logger.return_value.report_table.assert_called_once_with(
        title="table", series="eval", iteration=1, table_plot=rows
    )


def test_clearml_refuses_a_table_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, _ = clearml_task(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"'empty' has data=None and dataframe=None.*no rows.*Write `data="):
        tracker.log_table("empty", columns=["a"])


@pytest.mark.parametrize("way", ["start", "Experiment"])
def test_comet(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    opened = Mock()
    install(monkeypatch, "comet_ml", **{way: opened})  # `start` is missing before 3.41
    tracker = started("comet_ml", "project", online=False)
    opened.assert_called_once_with(project_name="project", online=False)
    experiment = tracker.tracker
    assert experiment is opened.return_value
    tracker.store_init_configuration(SETTINGS)
    with logged(r"'curve'.*numbers, text and dictionaries of numbers"):
        tracker.log({"loss": torch.tensor(0.5), "note": "text", "group": {"a": 1.0}, "curve": [1, 2]}, step=5)
    tracker.log({"later": 1})
    tracker.finish()
    assert experiment.mock_calls == [
        call.log_parameters(SETTINGS),
        call.set_step(5),
        call.log_metric("loss", 0.5, step=5),
        call.log_other("note", "text"),
        call.log_metrics({"a": 1.0}, step=5),
        call.log_metric("later", 1, step=None),
        call.end(),
    ]


def test_dvclive(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, metric = Mock(), Mock()
    metric.could_log.side_effect = lambda value: isinstance(value, (int, float, str))
    install(monkeypatch, "dvclive", Live=opened)
    install(monkeypatch, "dvclive.plots", Metric=metric)
    tracker = started("dvclive", "project", dir="live")
    opened.assert_called_once_with(dir="live")
    live = tracker.tracker
    assert live is opened.return_value
    tracker.store_init_configuration(SETTINGS)
    with logged(r"'rows'.*numbers and text"):
        tracker.log({**VALUES, "rows": torch.ones(2)}, step=7, plot=False)
    tracker.finish()
    assert live.step == 7
    assert live.mock_calls == [
        call.log_params(SETTINGS),
        *(call.log_metric(key, value, plot=False) for key, value in PLAIN.items()),
        call.next_step(),
        call.end(),
    ]
    given = Mock()
    second = started("dvclive", live=given)
    second.log({"loss": 1.0})
    assert second.tracker is given
    assert opened.call_count == 1
    assert given.mock_calls == [call.log_metric("loss", 1.0), call.next_step()]


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Mock:
    package = Mock()
    package.get_experiment_by_name.return_value = None
    package.create_experiment.return_value = 12
    monkeypatch.setitem(sys.modules, "mlflow", package)
    install(monkeypatch, "mlflow.utils.validation", MAX_PARAM_VAL_LENGTH=5, MAX_PARAMS_TAGS_PER_BATCH=2)
    return package


def test_mlflow_makes_the_experiment_where_there_is_none(mlflow: Mock, tmp_path: Any) -> None:
    tracker = started("mlflow", "project", tmp_path, tags='{"group": "vision"}', run_name="first", nested_run=True)
    mlflow.create_experiment.assert_called_once_with(
        "project", artifact_location=str(tmp_path), tags={"group": "vision"}
    )
    mlflow.start_run.assert_called_once_with(
        run_id=None, experiment_id="12", run_name="first", nested=True, tags={"group": "vision"}, description=None
    )
    assert tracker.tracker is mlflow.start_run.return_value


@pytest.mark.parametrize(("name", "experiment"), [("project", "7"), (None, None)])
def test_mlflow_takes_the_known_or_the_default_experiment(
    mlflow: Mock, name: str | None, experiment: str | None
) -> None:
    mlflow.get_experiment_by_name.return_value = Mock(experiment_id=7)
    started("mlflow", name, run_id="r")
    assert not mlflow.create_experiment.called
    started_with = mlflow.start_run.call_args.kwargs
    assert (started_with["experiment_id"], started_with["run_id"]) == (experiment, "r")


def test_mlflow_stores_settings_in_batches_without_long_ones(mlflow: Mock) -> None:
    tracker = started("mlflow")
    with logged(r"'long' is 6 characters long.*at most 5.*left out.*`log_artifact`"):
        tracker.store_init_configuration({"a": 1, "long": "x" * 6, "b": torch.tensor(2), "c": "x" * 5})
    assert mlflow.log_params.mock_calls == [call({"a": 1, "b": 2}), call({"c": "xxxxx"})]


def test_mlflow_records_numbers_figures_and_files(mlflow: Mock) -> None:
    tracker = started("mlflow")
    mlflow.reset_mock()
    with logged(r"'note'.*only numbers"):
        tracker.log({**VALUES, "note": "text"}, step=2, synchronous=False)
    tracker.log_figure("figure", "plot.png", save_kwargs={"dpi": 1})
    tracker.log_artifact("file", "folder")
    tracker.log_artifacts("files")
    tracker.finish()
    assert mlflow.mock_calls == [
        call.log_metrics(PLAIN, step=2, synchronous=False),
        call.log_figure("figure", "plot.png", save_kwargs={"dpi": 1}),
        call.log_artifact("file", artifact_path="folder"),
        call.log_artifacts("files", artifact_path=None),
        call.end_run(),
    ]


@pytest.mark.parametrize("tags", ["vision", "[1]"])
@pytest.mark.parametrize("from_environment", [False, True])
def test_mlflow_refuses_tags_that_are_no_dictionary(
    mlflow: Mock, monkeypatch: pytest.MonkeyPatch, tags: str, from_environment: bool
) -> None:
    if from_environment:
        monkeypatch.setenv("MLFLOW_TAGS", tags)
    with pytest.raises(ConfigurationError, match=r"tags are '.+', which is not the JSON text.*MLFLOW_TAGS, like \{"):
        LOGGER_TYPE_TO_CLASS["mlflow"]("project", tags=None if from_environment else tags)
    assert not mlflow.start_run.called


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Mock()
    package.Image.side_effect = lambda entry: f"image of {entry}"
    monkeypatch.setitem(sys.modules, "wandb", package)
    tracker = started("wandb", "project", mode="offline")
    package.init.assert_called_once_with(project="project", mode="offline")
    run = tracker.tracker
    assert run is package.init.return_value
    tracker.store_init_configuration(SETTINGS)
    tracker.log({"loss": 0.5}, step=3, commit=False)
    tracker.log_images({"pictures": ["a", "b"]}, step=4)
    tracker.log_table("table", columns=["a"], data=[[1]], step=5)
    package.Table.assert_called_once_with(columns=["a"], data=[[1]], dataframe=None)
    tracker.finish()
    assert run.mock_calls == [
        call.config.update(SETTINGS, allow_val_change=True),
        call.log({"loss": 0.5}, step=3, commit=False),
        call.log({"pictures": ["image of a", "image of b"]}, step=4),
        call.log({"table": package.Table.return_value}, step=5),
        call.finish(),
    ]


def test_swanlab(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Mock()
    package.Image.side_effect = lambda entry: f"image of {entry}"
    config: dict[str, Any] = {}
    package.init.return_value.config = config
    monkeypatch.setitem(sys.modules, "swanlab", package)
    tracker = started("swanlab", "project")
    tracker.store_init_configuration(SETTINGS)
    assert config == {"FRAMEWORK": "Accelerate", **SETTINGS}
    tracker.log(VALUES, step=3)
    tracker.log_images({"pictures": ["a"]}, step=4)
    tracker.finish()
    assert tracker.tracker.mock_calls == [
        call.log(PLAIN, step=3),
        call.log({"pictures": ["image of a"]}, step=4),
        call.finish(),
    ]


def test_no_warning_where_everything_is_recorded(mlflow: Mock) -> None:
    tracker = started("mlflow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.store_init_configuration({"a": 1})
        tracker.log(VALUES)
