"""The parts of a run's state, each of which can be written and read by itself."""

from __future__ import annotations

from .base import LoadOptions, Part, Prepared
from .loader import LoaderPart
from .objects import CustomPart, OptimizerPart, ProgressPart, ScalerPart, SchedulerPart
from .random import RandomPart
from .weights import ModelPart, WeightsPart
from .window import WindowPart

__all__ = [
    "CustomPart",
    "LoadOptions",
    "LoaderPart",
    "ModelPart",
    "OptimizerPart",
    "Part",
    "Prepared",
    "ProgressPart",
    "RandomPart",
    "ScalerPart",
    "SchedulerPart",
    "WeightsPart",
    "WindowPart",
]
