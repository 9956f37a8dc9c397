"""What programs use of DeepSpeed; the names stand in `deepspeed.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
