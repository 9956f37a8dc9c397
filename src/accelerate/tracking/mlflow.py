"""MLflow."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import log_once
from accelerate._base.imports import require
from accelerate._base.untrusted import parse_json
from accelerate.config import env
from accelerate.tracking.base import GeneralTracker, numbers, on_main_process, plain


def _package() -> ModuleType:
    return require("mlflow", why="The tracker 'mlflow'")


class MLflowTracker(GeneralTracker):
    """Record a run with MLflow, at the place that MLflow's own settings name.

    The variables `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` and `MLFLOW_NESTED_RUN`, where they are set,
    go before the arguments.

    Args:
        experiment_name: The experiment, made if there is none of that name; MLflow's default one if not given.
        logging_dir: Where a new experiment keeps its artifacts.
        run_id: A run to go on with.
        tags: A dictionary, or its JSON text.
        nested_run: Make the run a child of the active one.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = env.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = logging_dir
        self.run_id = env.get("MLFLOW_RUN_ID", run_id)
        self.tags = _read_tags(env.get("MLFLOW_TAGS") or tags)
        self.nested_run = env.flag("MLFLOW_NESTED_RUN", bool(nested_run))
        self.run_name = run_name
        self.description = description
        self.active_run: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the run in its experiment."""
        self.active_run = _package().start_run(
            run_id=self.run_id,
            experiment_id=self._experiment_id(),
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    def _experiment_id(self) -> str | None:
        if self.experiment_name is None:
            return None
        package = _package()
        known = package.get_experiment_by_name(self.experiment_name)
        if known is not None:
            return str(known.experiment_id)
        place = None if self.logging_dir is None else os.fspath(self.logging_dir)
        return str(package.create_experiment(self.experiment_name, artifact_location=place, tags=self.tags))

    @property
    def tracker(self) -> Any:
        """Return the active run."""
        return self.active_run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings as parameters, without those whose text is longer than MLflow stores."""
        limits = require("mlflow.utils.validation", why="The tracker 'mlflow'")
        settings = {}
        for key, value in plain(values).items():
            if len(str(value)) > limits.MAX_PARAM_VAL_LENGTH:
                log_once(
                    __name__,
                    f"The setting {key!r} is {len(str(value))} characters long and MLflow stores at most "
                    f"{limits.MAX_PARAM_VAL_LENGTH}, so it is left out. Shorten it, or store it with `log_artifact`.",
                )
            else:
                settings[key] = value
        names = list(settings)
        for first in range(0, len(names), limits.MAX_PARAMS_TAGS_PER_BATCH):
            batch = names[first : first + limits.MAX_PARAMS_TAGS_PER_BATCH]
            _package().log_params({name: settings[name] for name in batch})

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as metrics."""
        _package().log_metrics(numbers(values, self.name), step=step, **kwargs)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Record a figure of matplotlib or plotly as an artifact."""
        _package().log_figure(figure, artifact_file, **save_kwargs)

    @on_main_process
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Record a file as an artifact."""
        _package().log_artifact(local_path, artifact_path=artifact_path)

    @on_main_process
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Record the files of a folder as artifacts."""
        _package().log_artifacts(local_dir, artifact_path=artifact_path)

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        _package().end_run()


def _read_tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return tags
    try:
        found = parse_json(tags)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"MLflow's tags are {tags!r}, which is not the JSON text of a dictionary. "
            'Write them, in `tags` or in MLFLOW_TAGS, like {"team": "vision"}.'
        )
    return found
