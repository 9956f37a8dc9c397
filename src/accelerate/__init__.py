"""Run one plain PyTorch loop on one process or on many, with the same numbers.

The names stand in the stub beside this file and are imported when they are first read: `import accelerate` does not
import torch.
"""

from accelerate._base.lazy import attach_stub
from accelerate.config import env

__getattr__, __dir__ = attach_stub(__name__)
__version__ = "2.0.0"

# Asked of the variable alone, so that the usual import does not look for rich.
if env.flag("ACCELERATE_ENABLE_RICH"):
    from accelerate.runtime.availability import install_rich_traceback

    install_rich_traceback()
