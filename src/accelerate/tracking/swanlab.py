"""SwanLab."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .._base.imports import require
from .base import GeneralTracker, on_main_process
from .values import plain


def _package() -> ModuleType:
    return require("swanlab", why="The tracker 'swanlab'")


class SwanLabTracker(GeneralTracker):
    """Record a run with SwanLab; every process that starts one may log.

    Args:
        run_name: The project.
        kwargs: Passed on to `swanlab.init`.
    """

    name = "swanlab"
    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the run, marked as one of this library."""
        self.run = _package().init(**{"project": self.run_name, **self.init_kwargs})
        self.run.config["FRAMEWORK"] = "Accelerate"

    @property
    def tracker(self) -> Any:
        """Return the run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings in the run's config."""
        self.run.config.update(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record anything that `Run.log` takes."""
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images."""
        image = _package().Image
        self.log({key: [image(entry) for entry in images] for key, images in values.items()}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run and wait until it is written."""
        self.run.finish()
