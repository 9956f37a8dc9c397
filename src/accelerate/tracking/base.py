"""What every tracker shares: its interface, the rule of which process acts, the values that packages take."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from accelerate._base.errors import AccelerateError
from accelerate._base.helpers import log_once
from accelerate.runtime import current

F = TypeVar("F", bound=Callable[..., Any])

_REQUIRED = ("name", "requires_logging_directory", "tracker")


class IncompleteTrackerError(AccelerateError, NotImplementedError):
    """Report a tracker class that lacks an attribute every tracker has."""


def on_main_process(function: F) -> F:
    """Make a tracker's method act on the main process alone, unless its `main_process_only` is false.

    On the other processes the method returns None.
    """

    @wraps(function)
    def on_this_process(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and current.runtime().rank != current.main_rank():
            return None
        return function(self, *args, **kwargs)

    return cast("F", on_this_process)


class GeneralTracker:
    """Record a run somewhere; derive from this class to add a place.

    A class of its own defines `name`, `requires_logging_directory` (whether it is made with a folder as its second
    argument), the property `tracker` (the object of the underlying package), and the methods below. Set
    `main_process_only` to False where every process may act.

    Args:
        _blank: Make an instance that records nothing, without the check for these attributes.

    Raises:
        IncompleteTrackerError: A required attribute is missing.
    """

    main_process_only: bool = True
    name: str
    requires_logging_directory: bool

    if TYPE_CHECKING:  # at run time it must be missing here, so that the check below sees who forgot it

        @property
        def tracker(self) -> Any: ...

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        # `dir` and not `hasattr`: a property would run here, before `start` made what it returns.
        missing = [attribute for attribute in _REQUIRED if attribute not in dir(self)]
        if missing:
            raise IncompleteTrackerError(
                f"The tracker class {type(self).__qualname__!r} does not define {', '.join(map(repr, missing))}, and "
                "without that it cannot be found by name, given its folder or unwrapped. Define `name` (text) and "
                "`requires_logging_directory` (a bool) in the class, and `tracker` as a property."
            )

    def start(self) -> None:
        """Open the run; called once, by `Accelerator.init_trackers`, and not by the constructor."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values at a step.

        Args:
            kwargs: Passed on to the underlying package.
        """

    def finish(self) -> None:
        """Close the run and write what is still in memory."""


class BlankTracker(GeneralTracker):
    """Stand in for a tracker where nothing is recorded: every method can be called and does nothing.

    A script calls `get_tracker(name).log_images(...)` on all processes; only the main one has the real tracker.
    """

    requires_logging_directory = False

    def __init__(self, name: str = "") -> None:
        super().__init__(_blank=True)
        self.name = name

    @property
    def tracker(self) -> BlankTracker:
        """Return itself, so that calls on the unwrapped object do nothing either."""
        return self

    def __getattr__(self, attribute: str) -> Callable[..., None]:
        if attribute.startswith("_"):  # pickle, copy and others ask for optional protocols
            raise AttributeError(attribute)
        return lambda *args, **kwargs: None


# --- what users log, as tracking packages take it ----------------------------------------------------------------------


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
    """Return the entries that are numbers, and log once of each other one."""
    found = {}
    for key, value in plain(values).items():
        if is_number(value):
            found[key] = value
        else:
            warn_left_out(key, value, tracker, "only numbers")
    return found


def warn_left_out(key: str, value: Any, tracker: str, takes: str) -> None:
    """Log once that an entry is not recorded."""
    log_once(
        __name__,
        f"{key!r} is of type {type(value).__name__!r} and the tracker {tracker!r} records {takes}, so it is left out. "
        "Log it as one of these, or record it with the object that `get_tracker(name, unwrap=True)` returns.",
    )
