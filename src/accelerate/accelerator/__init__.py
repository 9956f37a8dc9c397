"""The `Accelerator`: the one object a training loop talks to."""

from accelerate.accelerator.core import Accelerator

__all__ = ["Accelerator"]
