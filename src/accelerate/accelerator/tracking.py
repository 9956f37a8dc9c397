"""The trackers of an Accelerator: open, feed and close them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .._base.errors import ConfigurationError
from ..tracking.base import BlankTracker, GeneralTracker
from ..tracking.registry import LOGGER_TYPE_TO_CLASS, Chosen

if TYPE_CHECKING:
    from ..state import AcceleratorState


class TrackingMixin:
    """Record a run with the trackers named in `log_with`; only the main process does."""

    log_with: list[Chosen]
    trackers: list[GeneralTracker]
    state: AcceleratorState

    if TYPE_CHECKING:

        @property
        def logging_dir(self) -> str | os.PathLike[str] | None: ...

        @property
        def is_main_process(self) -> bool: ...

        def wait_for_everyone(self) -> None: ...

    _trackers_are_finished = False

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Open a run on every tracker of `log_with`.

        Args:
            config: Settings to record with it.
            init_kwargs: For the name of a tracker, further arguments of its constructor.

        Example:
            >>> accelerator = Accelerator(log_with="tensorboard", project_dir="runs")
            >>> accelerator.init_trackers("digits", config={"lr": 0.1})
        """
        if not self.is_main_process:
            return
        if self._trackers_are_finished:  # a second run after `end_training`
            self.trackers.clear()
            self._trackers_are_finished = False
        options = init_kwargs or {}
        made = [self._make_tracker(entry, project_name, options) for entry in self.log_with]
        new = [tracker for tracker in made if not any(tracker is known for known in self.trackers)]
        for tracker in new:
            tracker.start()
            self.trackers.append(tracker)
        if config is not None:
            for tracker in new:
                tracker.store_init_configuration(config)

    def _make_tracker(self, entry: Chosen, project_name: str, init_kwargs: dict[str, dict[str, Any]]) -> GeneralTracker:
        if isinstance(entry, GeneralTracker):
            return entry
        make: Any = LOGGER_TYPE_TO_CLASS[str(entry)]
        folder = (self.logging_dir,) if make.requires_logging_directory else ()
        return make(project_name, *folder, **init_kwargs.get(str(entry), {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name.

        Where nothing is recorded (on other processes than the main one) the object that comes back has every method,
        and none does anything.

        Args:
            unwrap: Return the object of the underlying package instead.

        Raises:
            ConfigurationError: There are trackers, but none of that name.
        """
        for tracker in self.trackers:
            if tracker.name == str(name):
                return tracker.tracker if unwrap else tracker
        if not self.trackers:
            return BlankTracker(str(name))
        raise ConfigurationError(
            f"There is no tracker {str(name)!r} in this run: it records with "
            f"{', '.join(repr(tracker.name) for tracker in self.trackers)}. Write one of these, or add it to log_with."
        )

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record values with every tracker.

        Args:
            log_kwargs: For the name of a tracker, further arguments of its `log`.
        """
        if not self.is_main_process:
            return
        options = log_kwargs or {}
        for tracker in self.trackers:
            tracker.log(values, step=step, **options.get(tracker.name, {}))

    def end_training(self) -> None:
        """Close every tracker, wait for the other processes, and leave the process group."""
        if not self._trackers_are_finished:
            self._trackers_are_finished = True
            for tracker in self.trackers:
                tracker.finish()
        self.wait_for_everyone()
        self.state.destroy_process_group()
