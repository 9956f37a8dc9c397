"""Trackio."""

from __future__ import annotations

from accelerate.tracking.run import RunTracker


class TrackioTracker(RunTracker):
    """Record a run with trackio; its config is written with the first values that are logged."""

    name = "trackio"
