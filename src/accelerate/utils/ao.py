"""Training in 8-bit floats with torchao; the names stand in `ao.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
