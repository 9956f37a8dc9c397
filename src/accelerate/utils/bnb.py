"""Weights in 8 and 4 bits; the names stand in `bnb.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
