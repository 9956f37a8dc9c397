"""ClearML."""

from __future__ import annotations

from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.config import env
from accelerate.tracking.base import GeneralTracker, numbers, on_main_process

_SERIES = ("eval", "test", "train")


class ClearMLTracker(GeneralTracker):
    """Record a run with ClearML, in the task that is already open if there is one.

    Args:
        run_name: The project and the task, where `CLEARML_PROJECT` and `CLEARML_TASK` do not name them.
        kwargs: Passed on to `Task.init`.
    """

    name = "clearml"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.task: Any = None
        self._owns_task = False

    @on_main_process
    def start(self) -> None:
        """Take the open task, or open one."""
        task_class = require("clearml", why="The tracker 'clearml'").Task
        self.task = task_class.current_task()
        self._owns_task = self.task is None
        if self._owns_task:
            names = {
                "project_name": env.get("CLEARML_PROJECT", self.run_name),
                "task_name": env.get("CLEARML_TASK", self.run_name),
            }
            self.task = task_class.init(**{**names, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Return the task."""
        return self.task

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings as the task's configuration."""
        self.task.connect_configuration(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers: as single values without a step, as curves with one.

        `eval_loss`, `test_loss` and `train_loss` become the series eval, test and train of the plot `loss`.
        """
        logger = self.task.get_logger()
        for key, value in numbers(values, self.name).items():
            if step is None:
                logger.report_single_value(name=key, value=value, **kwargs)
            else:
                title, series = _title_and_series(key)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images."""
        logger = self.task.get_logger()
        for key, image in values.items():
            title, series = _title_and_series(key)
            logger.report_image(title=title, series=series, iteration=step, image=image, **kwargs)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Record a table, given as a data frame or by its rows with or without a head.

        Raises:
            ConfigurationError: Neither `data` nor `dataframe` is given.
        """
        if dataframe is None and data is None:
            raise ConfigurationError(
                f"The table {table_name!r} has data=None and dataframe=None, so it has no rows. "
                "Write `data=[[...], ...]` or `dataframe=...`."
            )
        rows = dataframe if dataframe is not None else [*([columns] if columns else []), *(data or [])]
        title, series = _title_and_series(table_name)
        self.task.get_logger().report_table(title=title, series=series, iteration=step, table_plot=rows, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the task, if it was opened here."""
        if self.task is not None and self._owns_task:
            self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    series, _, title = name.partition("_")
    return (title, series) if title and series in _SERIES else (name, "train")
