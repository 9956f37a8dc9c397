"""Recipes: how 8-bit numbers are scaled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Format(Enum):
    """The number formats of the forward and the backward pass."""

    E4M3 = (448, 448)
    E5M2 = (57344, 57344)
    HYBRID = (448, 57344)


@dataclass
class DelayedScaling:
    """Scale by what was seen in the last steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: object = None
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        assert self.fp8_format != Format.E5M2, "Pure E5M2 training is not supported."


@dataclass
class MXFP8BlockScaling:
    """Scale in blocks of 32 numbers."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
