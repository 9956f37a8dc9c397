"""The trackers of an Accelerator: open, feed and close them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelerate._base.errors import ConfigurationError
from accelerate.config.plugins.training import ProjectConfiguration
from accelerate.runtime import current
from accelerate.state import AcceleratorState

if TYPE_CHECKING:  # most runs have no tracker: their modules are imported by the runs that do
    from accelerate.tracking import GeneralTracker
    from accelerate.tracking.registry import Chosen


class TrackingMixin:
    """Record a run with the trackers named in `log_with`; only the main process does."""

    log_with: list[Chosen]
    trackers: list[GeneralTracker]
    project_configuration: ProjectConfiguration
    state: AcceleratorState
    _has_ended = False

    def _choose_trackers(self, log_with: Any) -> list[Chosen]:
        """Return the trackers that `log_with` names and that can be used here."""
        if log_with is None:
            return []
        from accelerate.tracking import filter_trackers

        return filter_trackers(log_with, self.project_configuration.logging_dir)

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
        if self._has_ended:  # a second run after `end_training`
            self.trackers.clear()
            self._has_ended = False
        if current.runtime().rank != 0:
            return
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
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

        if isinstance(entry, GeneralTracker):
            return entry
        make: Any = LOGGER_TYPE_TO_CLASS[str(entry)]
        folder = (self.project_configuration.logging_dir,) if make.requires_logging_directory else ()
        tracker: GeneralTracker = make(project_name, *folder, **init_kwargs.get(str(entry), {}))
        return tracker

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
            from accelerate.tracking.base import BlankTracker

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
        if current.runtime().rank != 0:
            return
        options = log_kwargs or {}
        for tracker in self.trackers:
            tracker.log(values, step=step, **options.get(tracker.name, {}))

    def end_training(self) -> None:
        """Close every tracker, wait for the other processes, and leave the process group.

        The run is over after this; a second call does nothing.
        """
        if self._has_ended:
            return
        self._has_ended = True
        # Each of these runs, the last one first, also when one before it fails: the others must not wait for ever.
        with ExitStack() as steps:
            steps.callback(self.state.destroy_process_group)
            accelerator: Any = self
            steps.callback(accelerator._stop_listening)
            if dist.is_available() and dist.is_initialized():
                steps.callback(self.state.wait_for_everyone)
            for tracker in reversed(self.trackers):
                steps.callback(tracker.finish)
            steps.callback(accelerator.wait_for_save)
