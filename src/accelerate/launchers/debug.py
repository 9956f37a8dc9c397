"""Try a function on several CPU processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from accelerate._base.errors import ConfigurationError
from accelerate.launchers.worker import Worker, checked_arguments


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run a function on several CPU processes, to try a training function before it goes to a real machine.

    Args:
        function: The function; each process runs it.
        args: Its arguments, in a tuple: `(value,)` for one.
        num_processes: How many processes to start.

    Raises:
        ConfigurationError: If the number of processes is not positive, or a process group exists here already.
        WrongTypeError: If `args` are not several values in an order.
        torch.multiprocessing.ProcessRaisedException: If the function fails in a process, with its traceback.

    Example:
        ```python
        from accelerate import Accelerator, debug_launcher


        def training_function() -> None:
            accelerator = Accelerator()
            accelerator.print(f"{accelerator.num_processes} processes")


        debug_launcher(training_function, num_processes=2)
        ```
    """
    args = checked_arguments(args)
    if num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes!r} starts nothing. Write 1 or more.")
    if torch.distributed.is_initialized():
        raise ConfigurationError(
            "debug_launcher was called in a process that is already in a process group, which its workers would inherit. "
            "Call it before an Accelerator is made under a launcher, or reset that one with `accelerator.reset()`."
        )
    folder = tempfile.TemporaryDirectory(prefix="accelerate-")
    variables = {
        "world_size": str(num_processes),
        "local_world_size": str(num_processes),
        "accelerate_mixed_precision": "no",
        "accelerate_debug_rdv_file": str(Path(folder.name) / "rendezvous"),
        "accelerate_use_cpu": "yes",
        "gloo_socket_ifname": "lo",
        "omp_num_threads": "1",
        "fork_launched": "1",
    }
    with folder:
        start_processes(Worker(function, args, variables), nprocs=num_processes, join=True, start_method="fork")
