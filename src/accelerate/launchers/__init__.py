"""Start a function on several processes of this machine."""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from accelerate._base.enums import PrecisionType
from accelerate._base.errors import AccelerateError, ConfigurationError, UsageError, WrongTypeError
from accelerate._base.helpers import Choice
from accelerate._base.lazy import attach_passing_names
from accelerate.config import env
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.devices.machine import Machine, detect, get_free_port, is_port_in_use
from accelerate.launch.failure import Failure, OutOfMemoryKills, first_failure, read_record, report
from accelerate.launch.host import Host, rank_config
from accelerate.launch.plan import ElasticOptions
from accelerate.launchers import tpu
from accelerate.runtime import current
from accelerate.state import PartialState

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]

attach_passing_names(__name__)

# Packages that set up the accelerator when they are imported.
_EAGER_PACKAGES = ("bitsandbytes",)
# Beside the record of a failure, which does not say whose it is.
_PID_FILE = "pid"


class ProcessFailedError(AccelerateError, RuntimeError):
    """Report the process that failed first, with its traceback.

    Args:
        rank: The process that failed.
        exit_code: How it ended; negative for a signal.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[ProcessFailedError], tuple[str, int, int]]:
        return type(self), (str(self), self.rank, self.exit_code)


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
    args = _checked_arguments(args)
    _check_positive(num_processes)
    if torch.distributed.is_initialized():
        raise ConfigurationError(
            "debug_launcher was called in a process that is already in a process group, which its workers would inherit. "
            "Call it before an Accelerator is made under a launcher, or reset that one with `accelerator.reset()`."
        )
    with tempfile.TemporaryDirectory(prefix="accelerate-") as folder:
        variables = {
            "world_size": str(num_processes),
            "local_world_size": str(num_processes),
            "accelerate_mixed_precision": "no",
            "accelerate_debug_rdv_file": str(Path(folder) / "rendezvous"),
            "accelerate_use_cpu": "yes",
            "gloo_socket_ifname": "lo",
            "omp_num_threads": "1",
            "fork_launched": "1",
        }
        worker = FunctionWorker(function, args, variables, forked=True)
        start_processes(worker, nprocs=num_processes, join=True, start_method="fork")


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

    One process runs in the notebook itself. On a machine with a TPU, or where `PJRT_DEVICE` names another XLA device,
    the function runs in a process for each device, and with `XLA_USE_SPMD=1` in the notebook, which then drives all
    devices together. With `ACCELERATE_DEBUG_MODE` set, processes that do nothing are started
    first, so that a notebook that cannot start any says so before the training begins.

    Args:
        function: The function; each process runs it. It makes its own `Accelerator`.
        args: Its arguments, in a tuple: `(value,)` for one.
        num_processes: How many processes to start on this machine; on XLA devices 1, or all where it is not given.
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
    args = _checked_arguments(args)
    machine = detect(env.items())
    precision = _checked_precision(mixed_precision)
    # A notebook of Colab or Kaggle has the hardware of one machine.
    hosted = "google.colab" in sys.modules or any(name.startswith("KAGGLE_") for name in env.items())
    if tpu.computes_on_xla(machine):
        _check_one_machine(num_nodes, max_restarts)
        return _run_on_tpu(function, args, num_processes, precision)
    if num_processes is None and hosted and machine.device_count < 2:
        num_processes = 1
    if num_processes is None:
        raise ConfigurationError(
            f"num_processes was not given, and a notebook does not say how many to start; this machine has {machine}. "
            f"Write num_processes={max(machine.device_count, 1)}, or another number."
        )
    _check_positive(num_processes)
    if not 0 <= node_rank < num_nodes:
        raise ConfigurationError(
            f"node_rank={node_rank!r} is not a place among num_nodes={num_nodes!r} machines. "
            f"Write a node_rank from 0 to {max(num_nodes - 1, 0)}."
        )
    variables = {"accelerate_mixed_precision": precision, "mixed_precision": precision}
    if num_processes * num_nodes == 1:
        with env.patch_environment(**variables):
            return function(*args)
    start_method = _choose_start_method(machine)
    _check_preconditions(machine, start_method, function)
    port = _rendezvous_port(use_port, one_machine=num_nodes == 1)
    options = ElasticOptions(
        nproc_per_node=num_processes,
        num_nodes=num_nodes,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{port}",
        rdzv_configs=rank_config(rdzv_backend, node_rank, num_nodes) | dict(rdzv_conf or {}),
        run_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        local_addr=master_addr if num_nodes == 1 else None,
    )
    more = {"start_method": start_method.value, "log_line_prefix_template": log_line_prefix_template}
    forked = start_method.value == "fork"
    variables |= {"fork_launched": "1", **({"omp_num_threads": "1"} if forked else {})}
    if env.flag("ACCELERATE_DEBUG_MODE"):
        trial = FunctionWorker(test_launch, (), variables, forked=forked, sends_result=True)
        _run_under_agent(trial, dataclasses.replace(options, max_restarts=0), **more)
    worker = FunctionWorker(function, args, variables, forked=forked, sends_result=True)
    results = _run_under_agent(worker, options, **more)
    return results if any(result is not None for result in results) else None


# --- arguments --------------------------------------------------------------------------------------------------------


def _checked_arguments(args: object) -> tuple[Any, ...]:
    # Text is a sequence of letters, which nobody means.
    if not isinstance(args, Iterable) or isinstance(args, (str, bytes, Mapping, AbstractSet)):
        raise WrongTypeError(
            f"args={args!r} is of the type {type(args).__name__}, but the function is called with the values of a "
            "sequence. Write args=(value,) for one value."
        )
    return tuple(args)


def _check_positive(num_processes: int) -> None:
    if num_processes < 1:
        raise ConfigurationError(f"num_processes={num_processes!r} starts nothing. Write 1 or more.")


def _check_one_machine(num_nodes: int, max_restarts: int) -> None:
    for name, value, usual in (("num_nodes", num_nodes, 1), ("max_restarts", max_restarts, 0)):
        if value != usual:
            raise ConfigurationError(
                f"{name}={value!r} is about torch's agent, and processes on XLA devices are started by torch_xla, once and "
                f"on this machine. Leave {name} out."
            )


def _checked_precision(mixed_precision: str) -> str:
    try:
        return str(PrecisionType(mixed_precision.lower()).value)
    except (ValueError, AttributeError) as error:
        known = ", ".join(repr(str(member.value)) for member in PrecisionType)
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r} is no precision. Write one of {known}."
        ) from error


def _rendezvous_port(use_port: str | int, *, one_machine: bool) -> int:
    try:
        port = int(use_port)
    except ValueError as error:
        raise ConfigurationError(
            f"use_port={use_port!r} is not a port. Write a number, or '0' for a free one."
        ) from error
    return get_free_port() if one_machine and (port == 0 or is_port_in_use(port)) else port


# --- preconditions ----------------------------------------------------------------------------------------------------


def _accelerator_of(machine: Machine) -> DeviceBackend | None:
    """Return the accelerator that processes would use, without asking its driver, which a fork may not survive."""
    if not machine.has_accelerator or env.flag("ACCELERATE_USE_CPU"):
        return None
    return next((backend for backend in registry.all_backends() if backend.type == machine.device_type), None)


def _choose_start_method(machine: Machine) -> Choice[str]:
    """Fork, so that the functions and data of the notebook are there at once, unless that cannot work here."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return Choice("spawn", f"{sys.platform} cannot fork")
    backend = _accelerator_of(machine)
    if backend is not None and not backend.is_fork_safe():
        return Choice("spawn", f"a forked process cannot use {backend.type}")
    return Choice("fork", "functions of the notebook are in a forked process at once")


def _check_no_state() -> None:
    """Refuse to start from a process whose state the others would inherit."""
    if current.PARTIAL or current.ACCELERATOR:
        place = current.made_at()
        where = f" by {place}" if place is not None else ""
        raise ConfigurationError(
            f"An Accelerator, or another state of this library, was made{where} in the process that is to start the "
            "others, which would take it for theirs. Make it inside the function that is launched; then restart the "
            "kernel, or call `accelerator.reset()`, and launch again."
        )
    if dist.is_available() and dist.is_initialized():
        raise ConfigurationError(
            f"torch.distributed has a process group ({dist.get_backend()}) in the process that is to start the others, "
            "which would inherit it. Remove the call of `init_process_group`, or call `destroy_process_group()` first."
        )


def _check_preconditions(machine: Machine, start_method: Choice[str], function: Callable[..., Any]) -> None:
    """Refuse to start from a process whose state the others would inherit, or that has used the accelerator."""
    _check_no_state()
    if start_method.value == "spawn":
        if getattr(function, "__module__", None) == "__main__":
            raise ConfigurationError(
                f"{getattr(function, '__name__', function)!r} is defined in the notebook, and new processes cannot find "
                f"it there: they are spawned, because {start_method.reason}. Write the function into a file and import it."
            )
        return
    backend = _accelerator_of(machine)
    imported = env.are_libraries_initialized(*_EAGER_PACKAGES)
    if backend is not None and (imported or backend.context_exists()):
        cause = (
            f"the import of {', '.join(imported)}" if imported else "a tensor, a model or a query that was sent there"
        )
        raise UsageError(
            f"This process has set up {backend.type!r} already ({cause}), and forked processes cannot use it then. "
            "Restart the kernel and move what touches the device, such as that import, into the function that is launched."
        )


# --- processes --------------------------------------------------------------------------------------------------------


class FunctionWorker:
    """A function with its arguments, to be called in another process.

    Args:
        variables: Environment variables of every process.
        forked: Whether the process is a copy of this one, with its state.
        sends_result: Whether the result is sent back; one that cannot be sent is dropped with a warning.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        variables: dict[str, str],
        *,
        forked: bool,
        sends_result: bool = False,
    ) -> None:
        self.function = function
        self.args = args
        self.variables = variables
        self.forked = forked
        self.sends_result = sends_result
        # The elastic agent names what it starts by these.
        self.__name__ = self.__qualname__ = str(getattr(function, "__qualname__", type(function).__name__))

    def __call__(self, rank: int | None = None) -> Any:
        """Call the function, as the process with this rank if the variables do not say who it is."""
        record = env.get("TORCHELASTIC_ERROR_FILE")
        if self.sends_result and record is not None:
            Path(record).with_name(_PID_FILE).write_text(str(os.getpid()))
        current.reset()
        if self.forked:
            # What an earlier launch left in the parent, and nobody has collected, needs threads that were not forked.
            gc.freeze()
            # A forked process must not enter a parallel region: the threads of its parent's pool were not forked.
            torch.set_num_threads(1)
        ranks = {} if rank is None else {"rank": str(rank), "local_rank": str(rank)}
        with env.patch_environment(**self.variables, **ranks):
            result = self.function(*self.args)
        if not self.sends_result:
            return None
        try:
            ForkingPickler.dumps(result)
        except (PicklingError, TypeError, AttributeError, RuntimeError) as error:
            warnings.warn(
                f"What {self.__qualname__} returned, a {type(result).__name__}, cannot leave its process: {error}. "
                "None takes its place. Return numbers, tensors on the CPU or a state dictionary.",
                stacklevel=1,
            )
            return None
        return result


def _run_under_agent(worker: FunctionWorker, options: ElasticOptions, **more: Any) -> list[Any]:
    """Run it on every process of this machine and return the results by rank.

    Args:
        more: Fields of torch's `LaunchConfig` that the options do not have.

    Raises:
        ProcessFailedError: If a process fails.
    """
    memory = OutOfMemoryKills.now()
    outcome = _outcome_under_agent(worker, options, **more)
    # What torch's agent leaves has threads. A process that is forked later, of another launch or of a loader, has not:
    # it would crash when it collects this.
    gc.collect()
    if isinstance(outcome, dict):
        return [outcome[rank] for rank in sorted(outcome)]
    root = first_failure(outcome)
    world_size = options.nproc_per_node * options.num_nodes
    text = report([root], world_size, memory, one_machine=options.num_nodes == 1).lstrip("\n-")
    raise ProcessFailedError(text, root.rank, root.exit_code)


def _outcome_under_agent(
    worker: FunctionWorker, options: ElasticOptions, **more: Any
) -> dict[int, Any] | list[Failure]:
    """Return the results by rank, or the failures."""
    # The kernel of a notebook keeps its own handlers: with those of the agent its stop button would no longer work.
    with (
        tempfile.TemporaryDirectory(prefix="accelerate-") as folder,
        env.patch_environment(torchelastic_signals_to_handle=""),
    ):
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from accelerate.launch.agent import Agent, launch_config, run_agent

        agents: list[Agent] = []
        try:
            return run_agent(launch_config(options, folder, **more), worker, started=agents.append)
        except ChildFailedError as error:
            return _failures(error.failures, Path(folder), agents[0].ended_functions)


def _failures(known: dict[int, Any], folder: Path, ended: Mapping[int, tuple[int, int]]) -> list[Failure]:
    """Return the failure that the agent names, and those of the other processes of this machine.

    Args:
        ended: The numbers and exit codes of processes, by local rank.
    """
    (rank, named), *_ = known.items()
    first_rank = rank - named.local_rank
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda attempt: int(attempt.name.rpartition("_")[2]))
    found = {}
    for records in attempts[-1].iterdir() if attempts else ():
        moment, text = read_record(records / "error.json")
        if moment is not None or text:
            local = int(records.name)
            pid = int((records / _PID_FILE).read_text())
            code = named.exitcode if local == named.local_rank else 1
            found[local] = Failure(first_rank + local, local, pid, code, moment or float(named.timestamp), text)
    if named.local_rank not in found:
        found[named.local_rank] = Failure(rank, named.local_rank, named.pid, named.exitcode, float(named.timestamp) + 1)
    for local, (pid, code) in ended.items():
        if local not in found and code < 0:
            # Killed, and nobody knows when: it counts where the others only lost a peer.
            found[local] = Failure(first_rank + local, local, pid, code, math.inf)
    return list(found.values())


def _run_on_tpu(function: Callable[..., Any], args: tuple[Any, ...], num_processes: int | None, precision: str) -> Any:
    if num_processes is not None:
        _check_positive(num_processes)
    host = Host()
    way = tpu.choose_way(host, num_processes, precision)
    variables = {"accelerate_mixed_precision": precision, "mixed_precision": precision}
    torch_xla = tpu.load(host)
    if way.value == "together":
        tpu.drive_all_devices(torch_xla, way.reason)
    if way.value != "processes":
        with env.patch_environment(**variables):
            return function(*args)
    _check_no_state()
    tpu.check_can_fork(torch_xla)
    variables["fork_launched"] = "1"
    trials = [(test_launch, ())] if env.flag("ACCELERATE_DEBUG_MODE") else []
    results: list[Any] = []
    for target, values in [*trials, (function, args)]:
        worker = FunctionWorker(target, values, variables, forked=True, sends_result=True)
        results, failure, text = tpu.run_processes(worker)
        if failure is not None:
            raise ProcessFailedError(text, failure.rank, failure.exit_code)
    return results if any(result is not None for result in results) else None
