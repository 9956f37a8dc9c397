"""Sharded training: wrapping, loading, saving and merging under FSDP; the names stand in `fsdp_utils.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
