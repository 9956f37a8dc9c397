"""Weights & Biases, and the packages that copy its way: `init` opens a run, which has a `config`, `log` and `finish`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from accelerate._base.imports import require
from accelerate.tracking.base import GeneralTracker, on_main_process, plain


class RunTracker(GeneralTracker):
    """Record with a package whose `init(project=...)` returns a run; every process that starts one may log.

    The class's `name` is the name of the package.

    Args:
        run_name: The project.
        kwargs: Passed on to the package's `init`.
    """

    requires_logging_directory = False
    main_process_only = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    def _package(self) -> ModuleType:
        return require(self.name, why=f"The tracker {self.name!r}")

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        self.run = self._package().init(**{"project": self.run_name, **self.init_kwargs})

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
        """Record anything that the run's `log` takes."""
        self.run.log(plain(values), step=step, **kwargs)

    @on_main_process
    def _log_image_lists(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        image = self._package().Image
        self.log({key: [image(entry) for entry in images] for key, images in values.items()}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run and wait until it is written."""
        self.run.finish()


class WandBTracker(RunTracker):
    """Record a run with wandb."""

    name = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings in the run's config; later values replace earlier ones."""
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record anything that `Run.log` takes."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images."""
        self._log_image_lists(values, step=step, **kwargs)

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
        """Record a table, given by its columns and rows or as a data frame."""
        table = self._package().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)


class SwanLabTracker(RunTracker):
    """Record a run with SwanLab."""

    name = "swanlab"

    @on_main_process
    def start(self) -> None:
        """Open the run, marked as one of this library."""
        super().start()
        self.run.config["FRAMEWORK"] = "Accelerate"

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images."""
        self._log_image_lists(values, step=step, **kwargs)


class TrackioTracker(RunTracker):
    """Record a run with trackio; its config is written with the first values that are logged."""

    name = "trackio"
