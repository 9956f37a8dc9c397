"""Run the packages of all trackers without a server, and read back what they wrote."""

from __future__ import annotations

import csv
import json
import sqlite3
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PROJECT = "run"
_BLOCK = 32768

# Beside each other in one process only one package may replace the streams of the terminal: two call each other for ever.
INIT_KWARGS: dict[str, dict[str, Any]] = {
    "aim": {"capture_terminal_logs": False, "system_tracking_interval": None},
    "clearml": {"auto_connect_frameworks": False, "auto_connect_streams": False, "auto_resource_monitoring": False},
}


def offline_variables(folder: Path) -> dict[str, str]:
    """Return the variables under which every package writes into a folder, and nothing to a network or a home."""
    # ClearML forks a process that reports; if threads of others were at work then, it stands still and is waited for.
    settings = folder / "clearml.conf"
    settings.write_text("sdk { development { report_use_subprocess: false } }\n")
    return {
        "HOME": str(folder),
        "CLEARML_CONFIG_FILE": str(settings),
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "CLEARML_OFFLINE_MODE": "1",
        "COMET_AUTO_LOG_OUTPUT_LOGGER": "0",
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "COMET_START_ONLINE": "0",
        "DVC_NO_ANALYTICS": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "SWANLAB_MODE": "offline",
        "SWANLAB_TERMINAL_PROXY_TYPE": "none",
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_CONSOLE": "off",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


@dataclass
class Recorded:
    """The settings and the curves that a package wrote."""

    settings: dict[str, Any] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, name: str, step: int, value: float) -> None:
        self.curves.setdefault(name, []).append((int(step), float(value)))

    def only(self, settings: list[str], curves: list[str]) -> dict[str, Any]:
        """Return these settings, as text, and these curves in the order of steps: what all packages can hold."""
        return {
            "settings": {name: str(self.settings[name]) for name in settings},
            "curves": {name: [list(point) for point in sorted(self.curves[name])] for name in curves},
        }


def read(name: str, folder: Path) -> Recorded:
    """Return what the tracker of that name wrote into the folder of one run."""
    return _READERS[name](folder)


def _only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def _tensorboard(folder: Path) -> Recorded:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = _only(folder, f"**/{PROJECT}/events.out.*").parent
    found = Recorded(yaml.safe_load(_only(run, "*/hparams.yml").read_text()))
    events = EventAccumulator(str(run)).Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            found.add(tag, event.step, event.value)
    return found


def _wandb(folder: Path) -> Recorded:
    from wandb.proto.wandb_internal_pb2 import Record

    found = Recorded()
    for payload in _log_records(_only(folder, "wandb/offline-run-*/run-*.wandb").read_bytes()):
        record = Record.FromString(payload)
        for entry in (*record.run.config.update, *record.config.update):
            found.settings[entry.key] = json.loads(entry.value_json)
        values = {entry.key or entry.nested_key[0]: json.loads(entry.value_json) for entry in record.history.item}
        for name, value in values.items():
            if isinstance(value, (int, float)):
                found.add(name, values["_step"], value)
    return found


def _comet(folder: Path) -> Recorded:
    found = Recorded()
    with zipfile.ZipFile(_only(folder, "comet/*.zip")) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").decode().splitlines()]
    for message in messages:
        payload = message["payload"]
        if message["type"] == "parameter_msg":
            found.settings[payload["param"]["paramName"]] = payload["param"]["paramValue"]
        if message["type"] == "metric_msg" and payload["metric"]["step"] is not None:
            found.add(payload["metric"]["metricName"], payload["metric"]["step"], payload["metric"]["metricValue"])
    return found


def _aim(folder: Path) -> Recorded:
    from aim import Repo, Run

    repository = _only(folder, "**/.aim").parent
    (name,) = Repo.from_path(str(repository)).list_all_runs()
    # Opened to be written, because only Aim's server makes the index that a reader goes by.
    run = Run(name, repo=str(repository), **INIT_KWARGS["aim"])
    found = Recorded(dict(run["hparams"]))
    for metric in run.metrics():
        frame = metric.dataframe()
        for step, value in zip(frame["step"], frame["value"], strict=True):
            found.add(metric.name, step, value)
    run.close()
    return found


def _mlflow(folder: Path) -> Recorded:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(PROJECT)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    found = Recorded(dict(run.data.params))
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found.add(name, metric.step, metric.value)
    return found


def _clearml(folder: Path) -> Recorded:
    with zipfile.ZipFile(_only(folder, "clearml/offline/*.zip")) as archive:
        events = [event for line in archive.read("metrics.jsonl").splitlines() for event in json.loads(line)]
        task = json.loads(archive.read("task.json"))
    lines = task["configuration"]["General"]["value"].splitlines()
    found = Recorded({name: json.loads(value) for name, _, value in (line.partition(" = ") for line in lines)})
    for event in events:
        if "value" in event:  # the tracker splits `eval_loss` into a plot and a series of it
            name = event["metric"] if event["variant"] == "train" else f"{event['variant']}_{event['metric']}"
            found.add(name, event["iter"], event["value"])
    return found


def _dvclive(folder: Path) -> Recorded:
    found = Recorded(yaml.safe_load((folder / "dvclive/params.yaml").read_text()))
    for path in (folder / "dvclive/plots/metrics").glob("*.tsv"):
        for row in csv.DictReader(path.read_text().splitlines(), delimiter="\t"):
            found.add(path.stem, int(row["step"]), float(row[path.stem]))
    return found


def _swanlab(folder: Path) -> Recorded:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    run = _only(folder, "swanlog/run-*")
    config = yaml.safe_load((run / "files/config.yaml").read_text())
    found = Recorded({name: entry["value"] for name, entry in config.items()})
    for payload in _log_records(_only(run, "*.swanlab").read_bytes()):
        record = Record.FromString(payload)
        if record.HasField("scalar"):
            found.add(record.scalar.key, record.scalar.step, record.scalar.value.number)
    return found


def _trackio(folder: Path) -> Recorded:
    database = sqlite3.connect(folder / "trackio" / f"{PROJECT}.db")
    ((settings,),) = database.execute("select config from configs").fetchall()
    found = Recorded(json.loads(settings))
    for step, values in database.execute("select step, metrics from metrics"):
        for name, value in json.loads(values).items():
            found.add(name, step, value)
    database.close()
    return found


def _log_records(data: bytes) -> Iterator[bytes]:
    """Return the records of a file in LevelDB's log format, as wandb and SwanLab write it after a head of 7 bytes."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if _BLOCK - position % _BLOCK < 7:  # the rest of a block that no header fits in
            position += _BLOCK - position % _BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


_READERS: dict[str, Callable[[Path], Recorded]] = {
    "aim": _aim,
    "clearml": _clearml,
    "comet_ml": _comet,
    "dvclive": _dvclive,
    "mlflow": _mlflow,
    "swanlab": _swanlab,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
}
