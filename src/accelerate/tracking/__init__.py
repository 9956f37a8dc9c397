"""Experiment trackers: one class for each, chosen by name or registered by others."""

from accelerate._base.enums import LoggerType
from accelerate._base.lazy import attach_passing_names
from accelerate.tracking.aim import AimTracker
from accelerate.tracking.base import GeneralTracker, IncompleteTrackerError, on_main_process
from accelerate.tracking.clearml import ClearMLTracker
from accelerate.tracking.comet import CometMLTracker
from accelerate.tracking.dvclive import DVCLiveTracker
from accelerate.tracking.mlflow import MLflowTracker
from accelerate.tracking.registry import (
    LOGGER_TYPE_TO_CLASS,
    filter_trackers,
    get_available_trackers,
    register_tracker_class,
)
from accelerate.tracking.tensorboard import TensorBoardTracker
from accelerate.tracking.wandb import SwanLabTracker, TrackioTracker, WandBTracker

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "IncompleteTrackerError",
    "LoggerType",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "register_tracker_class",
]

attach_passing_names(__name__)
