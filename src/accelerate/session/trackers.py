"""The trackers of a run: open, feed and close them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate.runtime import current
from accelerate.session.setup import Run

if TYPE_CHECKING:  # most runs have no tracker: their modules are imported by the runs that do
    from accelerate.tracking import GeneralTracker
    from accelerate.tracking.registry import Chosen

_logger = logging.getLogger(__name__)


@dataclass
class RunTrackers:
    """Record a run with the trackers that `log_with` names; only the main process does.

    Training is worth more than its record: a tracker that fails beside others is reported, and the run goes on.
    """

    run: Run
    open: list[GeneralTracker] = field(default_factory=list)
    has_ended: bool = False
    failures: dict[tuple[str, str], Exception] = field(default_factory=dict)
    """The first failure of each tracker to do each thing."""

    def choose(self, log_with: Any) -> None:
        """Use the trackers that `log_with` names, as far as they can be used here."""
        from accelerate.tracking import filter_trackers

        options = self.run.options
        options.log_with = filter_trackers(log_with, options.project_configuration.logging_dir)

    def start(
        self, project_name: str, config: dict[str, Any] | None, init_kwargs: dict[str, dict[str, Any]] | None
    ) -> None:
        """Open a run on every tracker.

        Raises:
            Exception: None of them could be opened; this is what the first one raised.
        """
        if self.has_ended:  # a second run after `end_training`
            self.open.clear()
            self.failures.clear()
            self.has_ended = False
        if self.run.runtime.rank != current.main_rank():
            return
        made = [self._make(chosen, project_name, init_kwargs or {}) for chosen in self.run.options.log_with]
        new = [tracker for tracker in made if not any(tracker is known for known in self.open)]
        started = [tracker for tracker in new if self._succeeds(tracker, "start", tracker.start)]
        self.open.extend(started)
        if new and not self.open:
            raise self.failures[new[0].name, "start"]
        if config is not None:
            for tracker in started:
                self._succeeds(tracker, "record the settings", partial(tracker.store_init_configuration, config))

    def _succeeds(self, tracker: GeneralTracker, action: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            if (tracker.name, action) not in self.failures:
                self.failures[tracker.name, action] = error
                _logger.exception(
                    "The tracker %r failed to %s; the run goes on. This is said once.", tracker.name, action
                )
            return False
        return True

    def _make(self, chosen: Chosen, project_name: str, init_kwargs: dict[str, dict[str, Any]]) -> GeneralTracker:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

        if isinstance(chosen, GeneralTracker):
            return chosen
        make: Any = LOGGER_TYPE_TO_CLASS[str(chosen)]
        folder = (self.run.options.project_configuration.logging_dir,) if make.requires_logging_directory else ()
        tracker: GeneralTracker = make(project_name, *folder, **init_kwargs.get(str(chosen), {}))
        return tracker

    def finish(self) -> None:
        """Close every tracker; what one cannot record any more does not make a failure of a run that was trained."""
        for tracker in self.open:
            self._succeeds(tracker, "finish", tracker.finish)

    def get(self, name: str, *, unwrap: bool) -> Any:
        """Return a tracker by its name, or the object of its package; a blank one where nothing is recorded."""
        for tracker in self.open:
            if tracker.name == str(name):
                return tracker.tracker if unwrap else tracker
        if not self.open or (str(name), "start") in self.failures:
            from accelerate.tracking.base import BlankTracker

            return BlankTracker(str(name))
        raise ConfigurationError(
            f"There is no tracker {str(name)!r} in this run: it records with "
            f"{', '.join(repr(tracker.name) for tracker in self.open)}. Write one of these, or add it to log_with."
        )

    def log(self, values: dict[str, Any], step: int | None, log_kwargs: dict[str, dict[str, Any]] | None) -> None:
        """Record values with every tracker."""
        if self.run.runtime.rank == current.main_rank():
            for tracker in self.open:
                options = (log_kwargs or {}).get(tracker.name, {})
                self._succeeds(tracker, "log", partial(tracker.log, values, step=step, **options))
