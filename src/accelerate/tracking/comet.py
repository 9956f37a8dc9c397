"""Comet."""

from __future__ import annotations

from typing import Any

from accelerate._base.imports import require
from accelerate.tracking.base import GeneralTracker, is_number, on_main_process, plain, warn_left_out


class CometMLTracker(GeneralTracker):
    """Record a run with Comet; API keys come from its own settings.

    Args:
        run_name: The project.
        kwargs: Passed on to `comet_ml.start` (`comet_ml.Experiment` before release 3.41).
    """

    name = "comet_ml"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the experiment."""
        package = require("comet_ml", why="The tracker 'comet_ml'")
        make = getattr(package, "start", None) or package.Experiment  # `start` came with 3.41.0
        self.writer = make(**{"project_name": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Return the experiment."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings as parameters."""
        self.writer.log_parameters(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as metrics, dictionaries as groups of metrics, and text beside them."""
        if step is not None:
            self.writer.set_step(step)
        for key, value in plain(values).items():
            if is_number(value):
                self.writer.log_metric(key, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(key, value, **kwargs)
            elif isinstance(value, dict):
                self.writer.log_metrics(value, step=step, **kwargs)
            else:
                warn_left_out(key, value, self.name, "numbers, text and dictionaries of numbers")

    @on_main_process
    def finish(self) -> None:
        """Close the experiment and wait until it is written."""
        self.writer.end()
