"""Operations on nested data and between processes; the names stand in `operations.pyi`."""

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)
