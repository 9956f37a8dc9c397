"""Training in 8-bit floats with TransformerEngine; the names stand in `transformer_engine.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
