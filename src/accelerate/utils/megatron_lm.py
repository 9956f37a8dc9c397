"""What programs use of Megatron-LM; the names stand in `megatron_lm.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
