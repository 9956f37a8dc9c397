"""Start a function of a notebook on several processes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from accelerate._base.enums import PrecisionType
from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.config import env
from accelerate.devices.machine import Machine, detect, get_free_port, is_port_in_use
from accelerate.launch.plan import ElasticOptions
from accelerate.launchers import beforehand
from accelerate.launchers.elastic import run_function
from accelerate.launchers.worker import ReturningWorker, checked_arguments
from accelerate.state import PartialState


def test_launch() -> None:
    """Start a process with nothing but its state, to see whether processes start at all."""
    PartialState()


# A test runner that meets the name must not take it for a test.
vars(test_launch)["__test__"] = False


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Run a function on several processes from a notebook.

    One process runs in the notebook itself. With `ACCELERATE_DEBUG_MODE` set, processes that do nothing are started
    first, so that a notebook that cannot start any says so before the training begins.

    Args:
        function: The function; each process runs it. It makes its own `Accelerator`.
        args: Its arguments, in a tuple: `(value,)` for one.
        num_processes: How many processes to start on this machine.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`, for an `Accelerator` that is not told.
        use_port: The port at which the processes meet. On one machine a free one takes the place of a busy one; `"0"`
            always takes a free one.
        master_addr: The address of the first machine.
        node_rank: The place of this machine among them.
        num_nodes: How many machines take part; the notebook of each calls this function.
        rdzv_backend: `"static"`, `"c10d"` or another backend of torch's rendezvous.
        rdzv_endpoint: Where it is; by default at `master_addr` and `use_port`.
        rdzv_conf: Further settings of it.
        rdzv_id: The name of the run, the same on all machines.
        max_restarts: How often the processes may be started anew after a failure.
        monitor_interval: Seconds between two looks at the processes.
        log_line_prefix_template: The prefix of lines of the processes' logs.

    Returns:
        What the function returned on each process of this machine, by rank, or None if it returned nothing anywhere;
        in the notebook itself, what it returned.

    Raises:
        ConfigurationError: If arguments cannot work, or an `Accelerator` or process group exists already.
        WrongTypeError: If `args` are not several values in an order.
        UsageError: If the notebook has set up the accelerator, so that forked processes could not use it.
        ProcessFailedError: If the function fails in a process, with its traceback.

    Example:
        ```python
        from accelerate import Accelerator, notebook_launcher


        def training_function(rate: float) -> int:
            accelerator = Accelerator(cpu=True)
            return accelerator.num_processes


        assert notebook_launcher(training_function, (0.1,), num_processes=2) == [2, 2]
        ```
    """
    args = checked_arguments(args)
    machine = detect(env.items())
    precision = _checked_precision(mixed_precision)
    if _is_hosted() and machine.device_type == "xla":
        return _run_on_tpu(function, args, precision)
    local = _checked_processes(num_processes, machine)
    _check_nodes(node_rank, num_nodes)
    variables = {"accelerate_mixed_precision": precision, "mixed_precision": precision}
    if local * num_nodes == 1:
        with env.patch_environment(**variables):
            return function(*args)
    method = beforehand.choose_start_method(machine)
    beforehand.check(machine, method, function)
    port = _meeting_port(use_port, alone=num_nodes == 1)
    options = ElasticOptions(
        nproc_per_node=local,
        num_nodes=num_nodes,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{port}",
        rdzv_configs=_own_place(rdzv_backend, node_rank, num_nodes) | dict(rdzv_conf or {}),
        run_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        local_addr=master_addr if num_nodes == 1 else None,
    )
    more = {"start_method": method.value, "log_line_prefix_template": log_line_prefix_template}
    forked = method.value == "fork"
    variables["fork_launched"] = "1"
    if forked:
        variables["omp_num_threads"] = "1"
    if env.flag("ACCELERATE_DEBUG_MODE"):
        trial = dataclasses.replace(options, max_restarts=0)
        run_function(ReturningWorker(test_launch, (), variables, forked=forked), trial, **more)
    results = run_function(ReturningWorker(function, args, variables, forked=forked), options, **more)
    return results if any(result is not None for result in results) else None


def _checked_precision(mixed_precision: str) -> str:
    try:
        return str(PrecisionType(mixed_precision.lower()).value)
    except (ValueError, AttributeError) as error:
        known = ", ".join(repr(str(member.value)) for member in PrecisionType)
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r} is no precision. Write one of {known}."
        ) from error


def _checked_processes(num_processes: int | None, machine: Machine) -> int:
    if num_processes is None and _is_hosted() and machine.device_count < 2:
        return 1
    if num_processes is None:
        raise ConfigurationError(
            f"num_processes was not given, and a notebook does not say how many to start; this machine has {machine}. "
            f"Write num_processes={max(machine.device_count, 1)}, or another number."
        )
    if num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes!r} starts nothing. Write 1 or more.")
    return num_processes


def _check_nodes(node_rank: int, num_nodes: int) -> None:
    if not 0 <= node_rank < num_nodes:
        raise ConfigurationError(
            f"node_rank={node_rank!r} is not a place among num_nodes={num_nodes!r} machines. "
            f"Write a node_rank from 0 to {max(num_nodes - 1, 0)}."
        )


def _is_hosted() -> bool:
    """Return whether this is a notebook of Colab or Kaggle, whose hardware is one machine's."""
    return "google.colab" in sys.modules or any(name.startswith("KAGGLE_") for name in env.items())


def _meeting_port(use_port: str | int, *, alone: bool) -> int:
    try:
        port = int(use_port)
    except ValueError as error:
        raise ConfigurationError(
            f"use_port={use_port!r} is not a port. Write a number, or '0' for a free one."
        ) from error
    return get_free_port() if alone and (port == 0 or is_port_in_use(port)) else port


def _own_place(backend: str, node_rank: int, num_nodes: int) -> dict[str, Any]:
    if backend == "static":
        return {"rank": node_rank}
    # Without a rank the c10d backend compares host names to find out who holds the store.
    return {"is_host": str(node_rank == 0)} if backend == "c10d" and num_nodes > 1 else {}


def _run_on_tpu(function: Callable[..., Any], args: tuple[Any, ...], precision: str) -> None:
    xla: Any = require("torch_xla", why="a notebook with a TPU starts its processes through it")
    with env.patch_environment(accelerate_mixed_precision=precision, fork_launched="1"):
        xla.launch(lambda index: function(*args), start_method="fork")
