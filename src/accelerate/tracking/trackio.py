"""Trackio."""

from __future__ import annotations

from typing import Any

from .._base.imports import require
from .base import GeneralTracker, on_main_process
from .values import plain


class TrackioTracker(GeneralTracker):
    """Record a run with trackio; every process that starts one may log.

    Args:
        run_name: The project.
        kwargs: Passed on to `trackio.init`.
    """

    name = "trackio"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        package = require("trackio", why="The tracker 'trackio'")
        self.run = package.init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Return the run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings in the run's config, which is written with the first values that are logged."""
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record anything that `Run.log` takes."""
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run and wait until it is written."""
        self.run.finish()
