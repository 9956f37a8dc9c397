"""The parts of a run's state, each of which can be written and read by itself."""

from __future__ import annotations

from accelerate.checkpointing.parts.base import LoadOptions, Part, Prepared
from accelerate.checkpointing.parts.loader import LoaderPart
from accelerate.checkpointing.parts.objects import CustomPart, OptimizerPart, ProgressPart, ScalerPart, SchedulerPart
from accelerate.checkpointing.parts.random import RandomPart
from accelerate.checkpointing.parts.weights import ModelPart, WeightsPart
from accelerate.checkpointing.parts.window import WindowPart

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
