"""Helpers for tests of this library and of programs that use it; nothing here loads torch before it is used.

The names stand in `__init__.pyi`.
"""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
