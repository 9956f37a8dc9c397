"""Weights & Biases."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from .._base.imports import require
from .base import GeneralTracker, on_main_process


def _package() -> ModuleType:
    return require("wandb", why="The tracker 'wandb'")


class WandBTracker(GeneralTracker):
    """Record a run with wandb; every process that starts one may log.

    Args:
        run_name: The project.
        kwargs: Passed on to `wandb.init`.
    """

    name = "wandb"
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
        self.run = _package().init(**{"project": self.run_name, **self.init_kwargs})

    @property
    def tracker(self) -> Any:
        """Return the run."""
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings in the run's config; later values replace earlier ones."""
        self.run.config.update(values, allow_val_change=True)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record anything that `Run.log` takes."""
        self.run.log(values, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record lists of images."""
        image = _package().Image
        self.log({key: [image(entry) for entry in images] for key, images in values.items()}, step=step, **kwargs)

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
        table = _package().Table(columns=columns, data=data, dataframe=dataframe)
        self.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the run and wait until it is written."""
        self.run.finish()
