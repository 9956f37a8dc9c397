"""The older home of `accelerate.utils.memory`."""

import warnings

from accelerate._base.lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__)

warnings.warn(
    "accelerate.memory_utils is now accelerate.utils.memory. Write `from accelerate.utils import find_executable_batch_size`.",
    FutureWarning,
    stacklevel=2,
)
