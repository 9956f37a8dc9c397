"""What the trackers around a run object share: `init` opens it, then it has a `config`, `log` and `finish`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from accelerate._base.imports import require
from accelerate.tracking.base import GeneralTracker, on_main_process
from accelerate.tracking.values import plain


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
