"""Weights & Biases."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import on_main_process
from accelerate.tracking.run import RunTracker


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
