"""A stand-in for torch_xla as it is where there is no TPU: importable, and it says that it runs on the CPU."""

from torch_xla import runtime

__all__ = ["runtime"]
__version__ = "2.9.0"
