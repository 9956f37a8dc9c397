"""What programs use of torch_xla's installation; the names stand in `torch_xla.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
