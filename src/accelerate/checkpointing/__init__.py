"""Write and read the state of a run; the public names stand in `__init__.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
