"""The `Accelerator`: the one object a training loop talks to."""

from .core import Accelerator

__all__ = ["Accelerator"]
