"""The entry of a process that another library starts for a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from accelerate._base.enums import DistributedType
from accelerate._base.errors import UsageError
from accelerate.config import env

_FILE = "ACCELERATE_DEBUG_RDV_FILE"
# Those whose processes each drive one accelerator, and learn from these variables which.
_ONE_DEVICE_EACH = frozenset(kind.value for kind in DistributedType if kind.value.startswith("MULTI_"))


class PrepareForLaunch:
    """A function that a process of `torch.multiprocessing` runs, once the process knows its rank.

    Args:
        launcher: The function.
        distributed_type: The regime of the run.
        debug: Meet the other processes at the file of `debug_launcher`.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(str(distributed_type).upper())
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Call the function as the process with this number.

        Raises:
            UsageError: If the processes are to meet at a file and none was named.
        """
        if self.debug:
            file, count = env.get(_FILE), env.integer("WORLD_SIZE", 0)
            if file is None or count < 1:
                raise UsageError(
                    f"PrepareForLaunch(debug=True) was called with {_FILE}={file!r} and WORLD_SIZE={count}, so the "
                    "processes cannot meet. Set both, or use debug_launcher, which does."
                )
            dist.init_process_group("gloo", store=FileStore(file, count), rank=int(index), world_size=count)
        elif self.distributed_type.value in _ONE_DEVICE_EACH:
            env.put("LOCAL_RANK", str(index))
            env.put("RANK", str(env.integer("NODE_RANK", 0) * env.integer("NPROC", 1) + index))
        env.put("FORK_LAUNCHED", "1")
        self.launcher(*args)
