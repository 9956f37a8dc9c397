"""Turn what users log into what tracking packages take."""

from __future__ import annotations

from typing import Any

from accelerate._base.helpers import warn_once


def plain(value: Any) -> Any:
    """Replace tensors and arrays by numbers (one element) or lists, inside dictionaries too."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if not hasattr(value, "tolist"):
        return value
    listed = value.tolist()
    while isinstance(listed, list) and len(listed) == 1:
        listed = listed[0]
    return listed


def is_number(value: Any) -> bool:
    """Say whether a plain value can be drawn as a curve."""
    return isinstance(value, (int, float))


def numbers(values: dict[str, Any], tracker: str) -> dict[str, Any]:
    """Return the entries that are numbers, and warn once of each other one."""
    found = {}
    for key, value in plain(values).items():
        if is_number(value):
            found[key] = value
        else:
            warn_left_out(key, value, tracker, "only numbers")
    return found


def warn_left_out(key: str, value: Any, tracker: str, takes: str) -> None:
    """Warn once that an entry is not recorded."""
    warn_once(
        f"{key!r} is of type {type(value).__name__!r} and the tracker {tracker!r} records {takes}, so it is left out. "
        "Log it as one of these, or record it with the object that `get_tracker(name, unwrap=True)` returns.",
        stacklevel=4,
    )
