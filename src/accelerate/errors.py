"""The exceptions that a program can catch: `AccelerateError`, and below it one for each kind of problem."""

from __future__ import annotations

from accelerate._base.errors import (
    AccelerateError,
    CheckpointError,
    ConfigurationError,
    DistributedOperationException,
    MissingFileError,
    MissingPackageError,
    MissingWeightsError,
    UnsupportedTorchError,
    UsageError,
    WeightsMismatchError,
    WrongHandlerError,
    WrongTypeError,
)

__all__ = [
    "AccelerateError",
    "CheckpointError",
    "ConfigurationError",
    "DistributedOperationException",
    "MissingFileError",
    "MissingPackageError",
    "MissingWeightsError",
    "UnsupportedTorchError",
    "UsageError",
    "WeightsMismatchError",
    "WrongHandlerError",
    "WrongTypeError",
]
