"""TensorBoard."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from accelerate._base.imports import is_package_available, require
from accelerate.tracking.base import GeneralTracker, is_number, on_main_process, plain, warn_left_out

_WHY = "The tracker 'tensorboard'"


def _writer_class() -> Any:
    if is_package_available("tensorboardX") and not is_package_available("tensorboard"):
        return require("tensorboardX", why=_WHY).SummaryWriter
    return require("torch.utils.tensorboard", why=_WHY, extra="trackers").SummaryWriter


class TensorBoardTracker(GeneralTracker):
    """Record a run in event files for TensorBoard.

    Args:
        run_name: The folder of the run inside `logging_dir`.
        kwargs: Passed on to `SummaryWriter`.
    """

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)  # noqa: PTH118 - text, as programs read it
        self.init_kwargs = kwargs
        self.writer: Any = None

    @on_main_process
    def start(self) -> None:
        """Open the event file."""
        self.writer = _writer_class()(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """Return the `SummaryWriter`."""
        return self.writer

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings as hyper-parameters, and in `hparams.yml` in a folder named after the time."""
        settings = {key: _setting(value) for key, value in plain(values).items()}
        # The table has no cell for None.
        self.writer.add_hparams({key: value for key, value in settings.items() if value is not None}, metric_dict={})
        self.writer.flush()
        file = Path(self.logging_dir, str(time.time()), "hparams.yml")
        file.parent.mkdir(parents=True, exist_ok=True)
        import yaml

        file.write_text(yaml.safe_dump(settings), encoding="utf-8")

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record numbers as scalars, text as text, and dictionaries of numbers as one group of scalars."""
        for key, value in plain(values).items():
            if is_number(value):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
            else:
                warn_left_out(key, value, self.name, "numbers, text and dictionaries of numbers")
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record batches of images, each a tensor or array of shape (N, C, H, W) unless `dataformats` says else."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Close the event file."""
        self.writer.close()


def _setting(value: Any) -> Any:
    """Return a setting as TensorBoard's table and YAML can both hold it."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
