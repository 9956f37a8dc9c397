"""Questions about optional packages and hardware; the names stand in `imports.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
