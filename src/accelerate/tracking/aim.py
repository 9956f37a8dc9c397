"""Aim."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from accelerate._base.imports import require
from accelerate.tracking.base import GeneralTracker, on_main_process, plain


def _package() -> ModuleType:
    return require("aim", why="The tracker 'aim'")


class AimTracker(GeneralTracker):
    """Record a run with Aim.

    Args:
        run_name: The name of the run.
        logging_dir: Aim's repository.
        kwargs: Passed on to `aim.Run`.
    """

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = logging_dir
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the run."""
        repository = None if self.aim_repo_path is None else os.fspath(self.aim_repo_path)
        self.writer = _package().Run(**{"repo": repository, **self.init_kwargs})
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """Return the run."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings under `hparams`."""
        self.writer["hparams"] = values

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record each value as a sequence of its name."""
        for key, value in plain(values).items():
            self.writer.track(value, name=key, step=step, **kwargs)

    @on_main_process
    def log_images(
        self, values: dict[str, Any], step: int | None = None, kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record images.

        Args:
            values: For each name an image, or a pair of an image and its caption.
            kwargs: Under `aim_image` what goes to `aim.Image`, under `track` what goes to `Run.track`.
        """
        options = kwargs or {}
        for key, value in values.items():
            picture, caption = value if isinstance(value, tuple) else (value, "")
            image = _package().Image(picture, **{"caption": caption, **options.get("aim_image", {})})
            self.writer.track(image, name=key, step=step, **options.get("track", {}))

    @on_main_process
    def finish(self) -> None:
        """Close the run."""
        self.writer.close()
