"""Helpers for environment variables and driver facts; the names stand in `environment.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
