"""The trackers of other packages, each with the real package, offline, in a process of its own.

A process of its own, because these packages patch other modules, set variables and end in exit handlers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.processes import script_environment

from accelerate._base import imports

HEAD = """
import json, sys
import numpy as np
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

def run(name, *args, **kwargs):
    tracker = LOGGER_TYPE_TO_CLASS[name]("project", *args, **kwargs)
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1, "name": "x"})
    tracker.log({"loss": 0.5, "tensor": torch.tensor(0.25), "numpy": np.float32(1.5)}, step=0)
    tracker.log({"eval_loss": 0.75}, step=3)
    return tracker

def show(found):
    print("FOUND " + json.dumps(found), flush=True)

image = np.zeros((8, 8, 3), dtype=np.uint8)
"""


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Any]:
    """Run code in a fresh process whose home and working folder are `tmp_path`; return what it shows."""

    def run(available: Callable[[], bool], code: str, **env: str) -> Any:
        if not available():
            pytest.skip(f"{available.__name__}() is false here")
        done = subprocess.run(
            [sys.executable, "-c", HEAD + code],
            cwd=tmp_path,
            env=script_environment({"HOME": str(tmp_path), **env}),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.rpartition("FOUND ")[2].partition("\n")[0])

    return run


def test_wandb(record: Callable[..., Any], tmp_path: Path) -> None:
    code = """
tracker = run("wandb", mode="offline")
tracker.store_init_configuration({"lr": 0.2})
tracker.log_images({"pictures": [image, image]}, step=4)
tracker.log_table("table", columns=["a", "b"], data=[[1, 2], [3, 4]], step=5)
summary = tracker.tracker.summary
names = ["loss", "tensor", "numpy", "eval_loss"]
show({
    "values": {name: summary[name] for name in names},
    "step": tracker.tracker.step,
    "config": dict(tracker.tracker.config),
    "project": tracker.tracker.project,
    "pictures": summary["pictures"]["count"],
})
tracker.finish()
"""
    assert record(imports.is_wandb_available, code, WANDB_SILENT="true") == {
        "values": {"loss": 0.5, "tensor": 0.25, "numpy": 1.5, "eval_loss": 0.75},
        "step": 5,
        "config": {"lr": 0.2, "name": "x"},
        "project": "project",
        "pictures": 2,
    }
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/table_*.table.json")
    assert json.loads(table.read_text())["data"] == [[1, 2], [3, 4]]


MLFLOW = {"MLFLOW_TRACKING_URI": "mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}


def test_mlflow(record: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "artifact.txt").write_text("hello")
    code = """
tracker = run("mlflow", run_name="first", tags={"team": "vision"}, description="about")
tracker.store_init_configuration({f"p{number}": number for number in range(250)})
tracker.log_artifact("artifact.txt", "folder")
run_id = tracker.tracker.info.run_id
tracker.finish()
import mlflow
client = mlflow.MlflowClient()
found = client.get_run(run_id)
second = LOGGER_TYPE_TO_CLASS["mlflow"]("project", run_id=run_id)
second.start()
show({
    "experiment": client.get_experiment(found.info.experiment_id).name,
    "name": found.info.run_name,
    "status": found.info.status,
    "team": found.data.tags["team"],
    "metrics": found.data.metrics,
    "history": [(metric.step, metric.value) for metric in client.get_metric_history(run_id, "eval_loss")],
    "num_params": len(found.data.params),
    "lr": found.data.params["lr"],
    "artifacts": [file.path for file in client.list_artifacts(run_id, "folder")],
    "resumed": second.tracker.info.run_id == run_id,
})
second.finish()
"""
    assert record(imports.is_mlflow_available, code, **MLFLOW) == {
        "experiment": "project",
        "name": "first",
        "status": "FINISHED",
        "team": "vision",
        "metrics": {"loss": 0.5, "tensor": 0.25, "numpy": 1.5, "eval_loss": 0.75},
        "history": [[3, 0.75]],
        "num_params": 252,
        "lr": "0.1",
        "artifacts": ["folder/artifact.txt"],
        "resumed": True,
    }


def test_mlflow_variables_go_before_arguments_and_long_settings_are_left_out(record: Callable[..., Any]) -> None:
    code = """
import logging
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH
tracker = LOGGER_TYPE_TO_CLASS["mlflow"]("project", tags={"team": "text"})
tracker.start()
said = []
handler = logging.Handler()
handler.emit = lambda entry: said.append(entry.getMessage())
logging.getLogger("accelerate").addHandler(handler)
tracker.store_init_configuration({"long": "x" * (MAX_PARAM_VAL_LENGTH + 1), "short": 1})
tracker.log({"loss": 1, "note": "text"}, step=0)
run_id = tracker.tracker.info.run_id
tracker.finish()
import mlflow
found = mlflow.MlflowClient().get_run(run_id)
show({
    "experiment": mlflow.get_experiment(found.info.experiment_id).name,
    "team": found.data.tags["team"],
    "params": found.data.params,
    "metrics": found.data.metrics,
    "warned": [message.split()[:3] for message in said if "left out" in message],
})
"""
    variables = {"MLFLOW_EXPERIMENT_NAME": "from the environment", "MLFLOW_TAGS": '{"team": "vision"}'}
    assert record(imports.is_mlflow_available, code, **MLFLOW, **variables) == {
        "experiment": "from the environment",
        "team": "vision",
        "params": {"short": "1"},
        "metrics": {"loss": 1.0},
        "warned": [["The", "setting", "'long'"], ["'note'", "is", "of"]],
    }


def test_dvclive(record: Callable[..., Any], tmp_path: Path) -> None:
    code = """
tracker = run("dvclive", dir="live", save_dvc_exp=False, dvcyaml=None)
step = tracker.tracker.step
tracker.finish()
given = LOGGER_TYPE_TO_CLASS["dvclive"](live=tracker.tracker)
given.start()
show({"same": given.tracker is tracker.tracker, "step": step})
"""
    assert record(imports.is_dvclive_available, code, DVC_NO_ANALYTICS="1") == {"same": True, "step": 4}
    assert yaml.safe_load((tmp_path / "live/params.yaml").read_text()) == {"lr": 0.1, "name": "x"}
    metrics = json.loads((tmp_path / "live/metrics.json").read_text())
    assert metrics == {"loss": 0.5, "tensor": 0.25, "numpy": 1.5, "eval_loss": 0.75, "step": 3}
    assert (tmp_path / "live/plots/metrics/eval_loss.tsv").read_text().split() == ["step", "eval_loss", "3", "0.75"]


def test_trackio(record: Callable[..., Any], tmp_path: Path) -> None:
    code = """
import sqlite3
tracker = run("trackio")
tracker.finish()
database = sqlite3.connect("data/project.db")
(config,) = database.execute("select config from configs").fetchone()
config = json.loads(config)
show({
    "values": [(step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics")],
    "config": {name: config[name] for name in ("lr", "name")},
})
"""
    assert record(imports.is_trackio_available, code, TRACKIO_DIR=str(tmp_path / "data")) == {
        "values": [[0, {"loss": 0.5, "tensor": 0.25, "numpy": 1.5}], [3, {"eval_loss": 0.75}]],
        "config": {"lr": 0.1, "name": "x"},
    }


def test_swanlab(record: Callable[..., Any], tmp_path: Path) -> None:
    code = """
tracker = run("swanlab", mode="offline", log_dir="swanlog")
tracker.log_images({"pictures": [image]}, step=4)
show({"config": {name: tracker.tracker.config[name] for name in ("lr", "name", "FRAMEWORK")}})
tracker.finish()
"""
    found = record(imports.is_swanlab_available, code)
    assert found == {"config": {"lr": 0.1, "name": "x", "FRAMEWORK": "Accelerate"}}
    (file,) = (tmp_path / "swanlog").glob("run-*/*.swanlab")
    assert all(name in file.read_bytes() for name in (b"loss", b"tensor", b"numpy", b"eval_loss", b"pictures"))


def test_aim(record: Callable[..., Any]) -> None:
    code = """
from PIL import Image
tracker = run("aim", ".", capture_terminal_logs=False)
tracker.log_images({"picture": (Image.fromarray(image), "a caption")}, step=4, kwargs={"track": {"epoch": 1}})
frames = {metric.name: metric.dataframe() for metric in tracker.tracker.metrics()}
logged = {name: frame for name, frame in frames.items() if not name.startswith("__system__")}
show({
    "name": tracker.tracker.name,
    "settings": tracker.tracker["hparams"],
    "values": {name: [frame["step"].tolist(), frame["value"].tolist()] for name, frame in logged.items()},
})
tracker.finish()
"""
    assert record(imports.is_aim_available, code) == {
        "name": "project",
        "settings": {"lr": 0.1, "name": "x"},
        "values": {"loss": [[0], [0.5]], "tensor": [[0], [0.25]], "numpy": [[0], [1.5]], "eval_loss": [[3], [0.75]]},
    }


def test_comet(record: Callable[..., Any], tmp_path: Path) -> None:
    code = """
tracker = run("comet_ml", online=False, api_key="none")
tracker.log({"note": "hello", "group": {"a": 1.0}}, step=5)
tracker.finish()
show({"kind": type(tracker.tracker).__name__})
"""
    found = record(imports.is_comet_ml_available, code, COMET_OFFLINE_DIRECTORY=str(tmp_path / "comet"))
    assert found["kind"].endswith("OfflineExperiment")
    (archive,) = (tmp_path / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").decode().splitlines()]
    metrics = [entry["payload"]["metric"] for entry in messages if entry["type"] == "metric_msg"]
    values = {entry["metricName"]: (entry["step"], entry["metricValue"]) for entry in metrics}
    expected = {"loss": (0, 0.5), "tensor": (0, 0.25), "numpy": (0, 1.5), "eval_loss": (3, 0.75), "a": (5, 1.0)}
    assert {name: values.get(name) for name in expected} == expected
    params = [entry["payload"]["param"] for entry in messages if entry["type"] == "parameter_msg"]
    assert {"lr": 0.1, "name": "x"}.items() <= {entry["paramName"]: entry["paramValue"] for entry in params}.items()


def test_clearml(record: Callable[..., Any], tmp_path: Path) -> None:
    code = """
from clearml import Task
tracker = run("clearml")
second = LOGGER_TYPE_TO_CLASS["clearml"]("other")
second.start()
tracker.log_images({"picture": image}, step=4)
tracker.log_table("table", columns=["a"], data=[[1], [2]], step=5)
try:
    tracker.log_table("empty")
except ValueError as error:
    refused = str(error)
second.finish()
still_open = Task.current_task() is tracker.tracker
names = [tracker.tracker.get_project_name(), tracker.tracker.name]
tracker.finish()
show({"same": second.tracker is tracker.tracker, "open": still_open, "refused": refused[:18], "names": names})
"""
    env = {"CLEARML_OFFLINE_MODE": "1", "CLEARML_TASK": "task of the environment"}
    found = record(imports.is_clearml_available, code, **env)
    assert found == {
        "same": True,
        "open": True,
        "refused": "The table 'empty' ",
        "names": ["project", env["CLEARML_TASK"]],
    }
    (archive,) = (tmp_path / ".clearml/cache/offline").glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        lines = opened.read("metrics.jsonl").decode().splitlines()
    events = [event for line in lines for event in json.loads(line)]
    scalars = {
        (event["metric"], event["variant"], event["iter"], event["value"]) for event in events if "value" in event
    }
    assert {
        ("loss", "train", 0, 0.5),
        ("tensor", "train", 0, 0.25),
        ("numpy", "train", 0, 1.5),
        ("loss", "eval", 3, 0.75),
    } <= scalars
    others = {(event["type"], event["metric"], event["iter"]) for event in events if "value" not in event}
    assert {("training_debug_image", "picture", 4), ("plot", "table", 5)} <= others
