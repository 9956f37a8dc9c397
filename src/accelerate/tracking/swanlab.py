"""SwanLab."""

from __future__ import annotations

from typing import Any

from accelerate.tracking.base import on_main_process
from accelerate.tracking.run import RunTracker


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
