"""Experiment trackers: one class for each, chosen by name or registered by others."""

from .._base.enums import LoggerType
from .aim import AimTracker
from .base import GeneralTracker, IncompleteTrackerError, on_main_process
from .clearml import ClearMLTracker
from .comet import CometMLTracker
from .dvclive import DVCLiveTracker
from .mlflow import MLflowTracker
from .registry import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers, register_tracker_class
from .swanlab import SwanLabTracker
from .tensorboard import TensorBoardTracker
from .trackio import TrackioTracker
from .wandb import WandBTracker

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
