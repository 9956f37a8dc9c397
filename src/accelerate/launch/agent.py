"""Carry out a plan under torch's elastic agent, in this process."""

from __future__ import annotations

import dataclasses
import gc
import logging
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._base.constants import PREEMPTED_EXIT_CODE, STOP_FOLDER
from accelerate.config import env
from accelerate.launch.failure import Failure, exit_code_of, first, read_record, report
from accelerate.launch.kernel import OutOfMemoryKills
from accelerate.launch.listeners import Listeners
from accelerate.launch.plan import SECONDS_TO_END, ElasticOptions
from accelerate.launch.signals import Stop, handled

if TYPE_CHECKING:
    from accelerate.launch.torch_agent import Agent

_LOGGERS = "torch.distributed.elastic"


def run_agent(
    argv: tuple[str, ...], environment: Mapping[str, str], options: ElasticOptions, *, folder: str, quiet: bool
) -> int:
    """Start the workers, wait for them, and report the first failure.

    Args:
        quiet: Report it in one line.
        folder: Where the records of failures go if no log folder was asked for.
    """
    listeners = Listeners(Path(folder) / "stop")
    variables: dict[str, object] = {
        **environment,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
        STOP_FOLDER: str(listeners.folder),
    }
    agents: list[Agent] = []

    def requested() -> None:
        for agent in agents:
            agent.give_up_restarts()

    stop = Stop(options.seconds_to_end, listeners.processes, requested)
    memory = OutOfMemoryKills.now()
    with env.patch_environment(**variables):
        # A million lasting objects come with torch; to look through them again and again takes a sixth of the time.
        gc.disable()
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from accelerate.launch import torch_agent

        gc.freeze()
        gc.enable()

        def stopped(number: signal.Signals) -> BaseException:
            return SignalException(f"the launcher got {number.name}", sigval=number)

        quieten()
        failures: list[Failure] = []
        try:
            with handled(stop, stopped):
                config = launch_config(options, folder, stop.seconds_to_end)
                torch_agent.run(config, argv[0], argv[1:], listeners=listeners, started=agents.append)
        except ChildFailedError as error:
            logs = Path(options.log_dir or folder)
            failures = [_failure(rank, failure, logs) for rank, failure in error.failures.items()]
        except (SignalException, KeyboardInterrupt):
            return stop.exit_code or 128 + signal.SIGINT
    if not failures:
        # Workers that listen end by themselves: to go on later, or because they were through.
        return PREEMPTED_EXIT_CODE if listeners.have_stopped else 0
    if stop.exit_code is not None:
        return stop.exit_code
    world_size = options.nproc_per_node * options.num_nodes
    sys.stdout.flush()
    sys.stderr.write(report(failures, world_size, memory, quiet=quiet))
    return exit_code_of(first(failures))


def launch_config(options: ElasticOptions, folder: str, seconds_to_end: float = SECONDS_TO_END, **more: Any) -> Any:
    """Return the configuration of torch's agent; `more` are fields that a command does not need."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    configs: dict[str, Any] = dict(options.rdzv_configs)
    if "rank" in configs:
        configs["rank"] = int(configs["rank"])
    values: dict[str, Any] = {
        "min_nodes": options.num_nodes,
        "max_nodes": options.num_nodes,
        "nproc_per_node": options.nproc_per_node,
        "run_id": options.run_id,
        "role": options.role,
        "rdzv_backend": options.rdzv_backend,
        "rdzv_endpoint": options.rdzv_endpoint,
        "rdzv_configs": configs,
        "max_restarts": options.max_restarts,
        "monitor_interval": options.monitor_interval,
        "local_addr": options.local_addr,
        "logs_specs": DefaultLogsSpecs(log_dir=options.log_dir or folder, tee=Std.from_str(options.tee)),
        # The handlers of this package stay in place of the agent's.
        "signals_to_handle": "",
        "shutdown_timeout": int(seconds_to_end),
        **more,
    }
    # The last two came after torch 2.9.
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in values.items() if name in known})


def _failure(rank: int, failure: Any, logs: Path) -> Failure:
    # The agent names a record only where there is one, and a process that was struck down leaves its stack alone.
    places = sorted(logs.glob(f"*/attempt_*/{failure.local_rank}"), key=lambda place: place.stat().st_mtime)
    moment, text = read_record(places[-1] / "error.json") if places else (None, "")
    # The agent keeps whole seconds of the time at which it saw the end.
    noticed = min(float(failure.timestamp) + 1.0, time.time())
    return Failure(rank, failure.local_rank, failure.pid, failure.exitcode, moment or noticed, text)


def quieten() -> None:
    """Silence the agent's own account of a failure, which the report replaces, unless a level was asked for."""
    if env.get("LOGLEVEL") is None:
        # Each of the agent's loggers has a level of its own.
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
