"""DVCLive."""

from __future__ import annotations

from typing import Any

from accelerate._base.imports import require
from accelerate.tracking.base import GeneralTracker, on_main_process, plain, warn_left_out


class DVCLiveTracker(GeneralTracker):
    """Record a run with DVCLive.

    Args:
        run_name: Not used; DVC names its experiments itself (`exp_name=` sets one).
        live: A `Live` to record with, instead of a new one.
        kwargs: Passed on to `dvclive.Live`.
    """

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.live = live
        self.init_kwargs = kwargs

    @on_main_process
    def start(self) -> None:
        """Open a `Live`, if none was given."""
        if self.live is None:
            self.live = require("dvclive", why="The tracker 'dvclive'").Live(**self.init_kwargs)

    @property
    def tracker(self) -> Any:
        """Return the `Live`."""
        return self.live

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings as parameters."""
        self.tracker.log_params(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record metrics, then go to the next step."""
        metric = require("dvclive.plots", why="The tracker 'dvclive'").Metric
        live = self.tracker
        if step is not None:
            live.step = step
        for key, value in plain(values).items():
            if metric.could_log(value):
                live.log_metric(key, value, **kwargs)
            else:
                warn_left_out(key, value, self.name, "numbers and text")
        live.next_step()

    @on_main_process
    def finish(self) -> None:
        """Close the `Live` and write its report."""
        self.tracker.end()
