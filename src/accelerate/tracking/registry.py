"""The table of trackers, and the choice of those that a run uses."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from accelerate._base import imports
from accelerate._base.enums import LoggerType
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.runtime import current
from accelerate.tracking.aim import AimTracker
from accelerate.tracking.base import GeneralTracker
from accelerate.tracking.clearml import ClearMLTracker
from accelerate.tracking.comet import CometMLTracker
from accelerate.tracking.dvclive import DVCLiveTracker
from accelerate.tracking.mlflow import MLflowTracker
from accelerate.tracking.tensorboard import TensorBoardTracker
from accelerate.tracking.wandb import SwanLabTracker, TrackioTracker, WandBTracker

Chosen = str | LoggerType | GeneralTracker

_PLUGINS = "accelerate.trackers"
_BUILT_IN: tuple[tuple[LoggerType, type[GeneralTracker], Callable[[], bool]], ...] = (
    (LoggerType.TENSORBOARD, TensorBoardTracker, imports.is_tensorboard_available),
    (LoggerType.WANDB, WandBTracker, imports.is_wandb_available),
    (LoggerType.COMETML, CometMLTracker, imports.is_comet_ml_available),
    (LoggerType.AIM, AimTracker, imports.is_aim_available),
    (LoggerType.MLFLOW, MLflowTracker, imports.is_mlflow_available),
    (LoggerType.CLEARML, ClearMLTracker, imports.is_clearml_available),
    (LoggerType.DVCLIVE, DVCLiveTracker, imports.is_dvclive_available),
    (LoggerType.SWANLAB, SwanLabTracker, imports.is_swanlab_available),
    (LoggerType.TRACKIO, TrackioTracker, imports.is_trackio_available),
)

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {str(name): tracker for name, tracker, _ in _BUILT_IN}
"""Every tracker that can be chosen by name."""

_logger = logging.getLogger(__name__)


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let a tracker class be chosen by its `name`, as the built-in ones are.

    A package outside this one names the class in its entry-point group `accelerate.trackers` instead.

    Raises:
        ConfigurationError: It is not a tracker class, or lacks `name` or `requires_logging_directory`.
    """
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ConfigurationError(
            f"{tracker_class!r} cannot be registered as a tracker, because it is not a class derived from "
            "GeneralTracker. Write `class MyTracker(GeneralTracker)` and register that class."
        )
    name = getattr(tracker_class, "name", None)
    if not name or getattr(tracker_class, "requires_logging_directory", None) is None:
        raise ConfigurationError(
            f"The tracker class {tracker_class.__qualname__!r} cannot be registered: it has name={name!r} and "
            f"requires_logging_directory={getattr(tracker_class, 'requires_logging_directory', None)!r}, and a run "
            'finds it by the one and makes it by the other. Write `name = "..."` and '
            "`requires_logging_directory = False` in the class."
        )
    if str(name) in LOGGER_TYPE_TO_CLASS:
        warn_once(
            f"The tracker {str(name)!r} was {LOGGER_TYPE_TO_CLASS[str(name)].__qualname__} and is from now on "
            f"{tracker_class.__qualname__}. Give the new class another `name` to keep both.",
        )
    LOGGER_TYPE_TO_CLASS[str(name)] = tracker_class


@cache
def _load_plugins() -> None:
    for entry in entry_points(group=_PLUGINS):
        register_tracker_class(entry.load())


@cache
def _available() -> tuple[LoggerType, ...]:
    return tuple(name for name, _, is_available in _BUILT_IN if is_available())


def get_available_trackers() -> list[LoggerType]:
    """Return the built-in trackers whose package is installed."""
    return list(_available())


def filter_trackers(
    log_with: Chosen | Iterable[Chosen] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[Chosen]:
    """Return the trackers of a run, each once: the given instances, then the names that can be used.

    Args:
        log_with: Names, instances, or "all" for every tracker that is installed.
        logging_dir: Where trackers that need a folder put it.

    Raises:
        ConfigurationError: A name is not known, or its tracker needs a folder and none is given.
    """
    several = isinstance(log_with, (list, tuple, set, frozenset))
    given: list[Any] = list(log_with) if several else [log_with]  # type: ignore[arg-type]
    if given in ([], [None]):
        return []
    _load_plugins()
    instances = list(dict.fromkeys(entry for entry in given if isinstance(entry, GeneralTracker)))
    names = list(dict.fromkeys(_checked_name(entry) for entry in given if not isinstance(entry, GeneralTracker)))
    if str(LoggerType.ALL) in names:
        usable = [str(name) for name in _available() if _has_folder(str(name), logging_dir)]
        _logger.debug("log_with='all' is %s", usable)
    else:
        usable = [name for name in names if _is_usable(name, logging_dir)]
    return [*instances, *(LoggerType(name) if name in LoggerType else name for name in usable)]


def _checked_name(entry: Any) -> str:
    name = str(entry)
    if isinstance(entry, (str, LoggerType)) and name in {*LOGGER_TYPE_TO_CLASS, str(LoggerType.ALL)}:
        return name
    raise ConfigurationError(
        f"log_with has {entry!r}, which is neither the name nor an instance of a tracker. Write one of "
        f"{', '.join(sorted({*LOGGER_TYPE_TO_CLASS, str(LoggerType.ALL)}))}, or make your own with a class derived "
        "from GeneralTracker and give an instance of it."
    )


def _has_folder(name: str, logging_dir: str | os.PathLike[str] | None) -> bool:
    return logging_dir is not None or not LOGGER_TYPE_TO_CLASS[name].requires_logging_directory


def _is_usable(name: str, logging_dir: str | os.PathLike[str] | None) -> bool:
    """Say whether a tracker's package is there, and warn once on the main process if it is not."""
    built_in = {str(known): (tracker, is_available) for known, tracker, is_available in _BUILT_IN}
    tracker, is_available = built_in.get(name, (None, lambda: True))
    if LOGGER_TYPE_TO_CLASS[name] is tracker and not is_available():
        started = current.active()
        if started is None or started.rank == 0:
            warn_once(
                f"log_with has {name!r}, whose package is not installed (or not in a version that works), so nothing is "
                f"recorded with it. Install it with `pip install {name.replace('_', '-')}`, or leave it out of log_with.",
                stacklevel=4,
            )
        return False
    if not _has_folder(name, logging_dir):
        raise ConfigurationError(
            f"log_with has {name!r} and logging_dir is {logging_dir!r}, but this tracker writes to a folder. "
            'Write `Accelerator(log_with=..., project_dir="...")`.'
        )
    return True
