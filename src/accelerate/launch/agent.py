"""Torch's elastic agent in this process, with what its own launcher does not offer.

The underscored names are those of torch 2.9 to 2.15; nothing else in this package uses them.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from accelerate._base.constants import PREEMPTED_EXIT_CODE
from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import first_line
from accelerate.config import env
from accelerate.devices.machine import listen_on_loopback
from accelerate.launch.failure import Failure, OutOfMemoryKills, exit_code_of, read_end, read_record, report
from accelerate.launch.host import LOOPBACK
from accelerate.launch.plan import OWN_STORES, ElasticOptions
from accelerate.launch.processes import GracefulWorkers, Shutdown

_LOGGERS = "torch.distributed.elastic"
_LOGS_SPECS = "torchrun.logs_specs"
_SECONDS_TO_CHECK_OUT = 0.5
_SECONDS_WITHOUT_PEERS = 5


class Agent(LocalElasticAgent):
    """An agent that others do not wait for after its workers failed, and that can be told not to start them anew.

    Args:
        graceful_workers: The workers that save on a signal, None where they are functions.
    """

    def __init__(self, *args: Any, graceful_workers: GracefulWorkers | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._graceful_workers = graceful_workers

    @property
    def world_size(self) -> int | None:
        """How many workers the last attempt had on all machines; None before the machines met."""
        workers = self._worker_group.workers
        return workers[0].world_size if workers and workers[0].world_size > 0 else None

    @property
    def ended_functions(self) -> dict[int, tuple[int, int]]:
        """The numbers and exit codes of the processes that ran functions and have ended, by local rank."""
        started = getattr(self._pcontext, "_pc", None)
        processes = enumerate(started.processes if started is not None else ())
        return {rank: (process.pid, process.exitcode) for rank, process in processes if process.exitcode is not None}

    def give_up_restarts(self) -> None:
        """Take the next failure of a worker as the end of the run."""
        self._remaining_restarts = 0

    def check_out(self) -> None:
        """Tell the agents of other machines, which wait for each other at the end, that this one will not come."""
        if self._store is not None and self._worker_group.group_world_size > 1:
            self._exit_barrier_timeout = _SECONDS_TO_CHECK_OUT
            self._exit_barrier()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Torch 2.9 to 2.15 keeps the store that workers of the first attempt met at: those of the next one would find
        # the addresses of the first there, and now and then try to reach them.
        handler = worker_group.spec.rdzv_handler
        for kept in ("_bootstrap_store_info", "_shared_tcp_store_server"):
            if hasattr(handler, kept):
                setattr(handler, kept, None)
        super()._rendezvous(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._graceful_workers is not None:
            self._graceful_workers.forget_stopped()
            # To a graceful worker SIGTERM is a request to save, which it cannot do without its peers.
            if self._pcontext is not None and self._graceful_workers.running():
                self._pcontext.close(signal.SIGTERM, _SECONDS_WITHOUT_PEERS)
        super()._stop_workers(worker_group)


class OneMachineRendezvous(RendezvousHandler):
    """Rendezvous of one agent with its own workers, at a store that listens on the loopback address only.

    The agent holds the store, its workers are clients. Each attempt gets a new one: in the old one, workers would find
    the addresses of those before them. Nothing in it is a pickle.

    Args:
        port: The port of the first attempt; 0 takes a free one.
    """

    def __init__(self, port: int, run_id: str) -> None:
        self._port = port
        self._run_id = run_id
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        # The agent keeps the store of the last attempt, and with it the port, until it has this one.
        listener = listen_on_loopback(self._port if self._store is None else 0)
        port = listener.getsockname()[1]
        # The store takes the socket over.
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        self._store = store
        return RendezvousInfo(PrefixStore(self._run_id, store), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other machine waits."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


def run_command(
    argv: tuple[str, ...], options: ElasticOptions, workers: GracefulWorkers, folder: str, *, quiet: bool
) -> int:
    """Start the workers, wait for them, report the first failure, and return the exit code of the run.

    Args:
        folder: Where the records of failures go if no log folder was asked for.
        quiet: Report the failure in one line.
    """
    agents: list[Agent] = []

    def give_up_restarts() -> None:
        for agent in agents:
            agent.give_up_restarts()

    def stopped(number: signal.Signals) -> BaseException:
        return SignalException(f"the launcher got {number.name}", sigval=number)

    shutdown = Shutdown(options.seconds_to_end, workers, give_up_restarts, ending=options.signals)
    options = _with_place_and_name(options)
    memory = OutOfMemoryKills.now()
    try:
        with shutdown.handlers(stopped):
            run_agent(launch_config(options, folder), argv[0], argv[1:], workers=workers, started=agents.append)
    except ChildFailedError as error:
        logs = Path(options.log_dir or folder)
        failures = _failures(error.failures, logs, options.nproc_per_node)
    except (SignalException, KeyboardInterrupt):
        return shutdown.exit_code or 128 + signal.SIGINT
    else:
        # Graceful workers end by themselves: to go on later, or because they were through.
        return PREEMPTED_EXIT_CODE if workers.have_stopped else 0
    if shutdown.exit_code is not None:
        return shutdown.exit_code
    sys.stdout.flush()
    world_size = agents[0].world_size or options.nproc_per_node * options.num_nodes
    sys.stderr.write(report(failures, world_size, memory, quiet=quiet, one_machine=options.num_nodes == 1))
    return exit_code_of(failures)


def _with_place_and_name(options: ElasticOptions) -> ElasticOptions:
    """Give the run a name of its own where it meets at a free port, and files that were asked for a folder that stays."""
    if options.run_id == ElasticOptions.run_id and options.rdzv_endpoint.endswith(":0"):
        options = dataclasses.replace(options, run_id=str(uuid.uuid4()))
    filters = (*options.duplicate_stdout_filters, *options.duplicate_stderr_filters)
    if (options.redirects != ElasticOptions.redirects or filters) and not options.log_dir:
        options = dataclasses.replace(options, log_dir=tempfile.mkdtemp(prefix="accelerate-logs-"))
        sys.stderr.write(f"accelerate launch: the output of the workers goes to {options.log_dir} (--log_dir)\n")
    return options


def launch_config(options: ElasticOptions, folder: str, **more: Any) -> LaunchConfig:
    """Return the configuration of torch's agent; `more` are fields of it that the options do not have.

    Raises:
        ConfigurationError: An option names something that torch does not have.
    """
    configs: dict[str, Any] = dict(options.rdzv_configs)
    if "rank" in configs:
        configs["rank"] = int(configs["rank"])
    values: dict[str, Any] = {
        "min_nodes": options.min_nodes or options.num_nodes,
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
        "logs_specs": _logs_specs(options, folder),
        "log_line_prefix_template": options.log_line_prefix_template
        or env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        "event_log_handler": _event_handler(options.event_log_handler),
        # The handlers of this package stay in place of the agent's. This and the timeout came after torch 2.9.
        "signals_to_handle": "",
        "shutdown_timeout": int(options.seconds_to_end),
        **more,
    }
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    newer = _newer_fields(options)
    for name in newer.keys() - fields:
        raise ConfigurationError(
            f"{name} was asked for, and torch {torch.__version__} does not have it. Install a newer one, or leave it out."
        )
    return LaunchConfig(**_known(values, fields), **newer)


def _newer_fields(options: ElasticOptions) -> dict[str, Any]:
    """Return what was asked for that not every release of torch since 2.9 has."""
    asked: dict[str, Any] = {}
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        if getattr(options, name):
            asked[name] = list(getattr(options, name))
    if options.virtual_local_rank:
        asked["virtual_local_rank"] = True
    if options.numa_binding:
        from torch.numa.binding import AffinityMode, NumaOptions

        asked["numa_options"] = NumaOptions(affinity_mode=AffinityMode(options.numa_binding))
    return asked


def _logs_specs(options: ElasticOptions, folder: str) -> LogsSpecs:
    specs: type[LogsSpecs] = DefaultLogsSpecs
    if options.logs_specs is not None:
        from importlib.metadata import entry_points

        known = entry_points(group=_LOGS_SPECS)
        if options.logs_specs not in known.names:
            raise ConfigurationError(
                f"--logs_specs={options.logs_specs!r} is no entry point of the group {_LOGS_SPECS!r}, which has "
                f"{sorted(known.names)}. Install the package that has it, or leave the option out."
            )
        specs = known[options.logs_specs].load()
    try:
        if options.log_dir:
            # torch makes the folder of a run only when the workers start.
            Path(options.log_dir).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryDirectory(dir=options.log_dir).cleanup()
        return specs(
            log_dir=options.log_dir or folder,
            redirects=Std.from_str(options.redirects),
            tee=Std.from_str(options.tee),
            local_ranks_filter=set(options.local_ranks_filter) or None,
        )
    except OSError as error:
        raise ConfigurationError(
            f"--log_dir={options.log_dir!r} cannot be written: {first_line(error)}. Write the path of a folder in which this "
            "user may create files."
        ) from error


def _event_handler(name: str) -> str:
    try:
        get_logging_handler(name)
    except KeyError as error:
        raise ConfigurationError(
            f"--event_log_handler={name!r} is not registered with torch.distributed.elastic.events. Write `console` or "
            "`null`, or the name of one that is."
        ) from error
    return name


def run_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    arguments: tuple[str, ...] = (),
    *,
    workers: GracefulWorkers | None = None,
    started: Callable[[Agent], None] = lambda agent: None,
) -> dict[int, Any]:
    """Start the workers, watch them, and return what they returned by rank.

    Args:
        started: Is called with the agent before it starts them.

    Raises:
        ChildFailedError: A worker fails and no restart is left.
        ConfigurationError: The machines do not find each other.
        SignalException: A handler of a signal raised it.
    """
    _silence_agent()
    handler = _rendezvous_handler(config)
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    fields = {field.name for field in dataclasses.fields(WorkerSpec)}
    own = {"local_world_size": config.nproc_per_node, "entrypoint": entrypoint, "args": arguments}
    spec = WorkerSpec(**{**_known(shared, fields), **own, "rdzv_handler": handler})
    parameters = inspect.signature(LocalElasticAgent.__init__).parameters
    agent = Agent(graceful_workers=workers, spec=spec, **_known(shared, parameters))
    started(agent)
    closes = True
    try:
        initialize_metrics(MetricsConfig(config.metrics_cfg))
        result = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result is None:
            return {}
        if result.is_failed():
            agent.check_out()
            raise ChildFailedError(str(entrypoint), result.failures)
        results: dict[int, Any] = result.return_values
        return results
    except SignalException:
        closes = False  # a rendezvous that was closed stays so for all machines
        events.record(agent.get_event_failed(), config.event_log_handler)
        agent.check_out()
        raise
    except (RendezvousError, DistError) as error:
        reason = "not all of them came in time" if isinstance(error, RendezvousTimeoutError) else first_line(error)
        raise ConfigurationError(
            f"The machines of this run could not meet at {config.rdzv_endpoint}: {reason}. Start the same command on all of "
            "them, and let them reach that port."
        ) from error
    finally:
        if closes:
            handler.shutdown()


def _rendezvous_handler(config: LaunchConfig) -> RendezvousHandler:
    parameters = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    if config.rdzv_backend not in OWN_STORES:
        try:
            return rendezvous_registry.get_rendezvous_handler(parameters)
        except (ValueError, ImportError, RendezvousError) as error:
            raise ConfigurationError(
                f"--rdzv_backend={config.rdzv_backend!r} cannot be used ({first_line(error)}). Write static or c10d, or install "
                "what provides that backend."
            ) from error
    if config.max_nodes == 1:
        return OneMachineRendezvous(parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=0)[1], config.run_id)
    from accelerate.launch import rendezvous

    try:
        return rendezvous.handler_of_machines(parameters)
    except ConfigurationError:
        raise
    except ValueError as error:
        pairs = ",".join(f"{key}={value}" for key, value in config.rdzv_configs.items())
        raise ConfigurationError(
            f"--rdzv_conf={pairs!r} cannot be used ({first_line(error)}). Correct that value."
        ) from error


def _known(values: dict[str, Any], names: Any) -> dict[str, Any]:
    """Leave out what this version of torch does not have."""
    return {name: value for name, value in values.items() if name in names}


def _silence_agent() -> None:
    """Silence the agent's own account of a failure, which the report replaces, unless a level was asked for."""
    if env.get("LOGLEVEL") is None:
        # Each of the agent's loggers has a level of its own.
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _attempt(records: Path) -> tuple[float, int]:
    """Return which attempt a folder is of: of the last run in it, the one with the highest number."""
    return records.parents[1].stat().st_mtime, int(records.parent.name.rpartition("_")[2])


def _failures(known: dict[int, Any], logs: Path, local_world_size: int) -> list[Failure]:
    """Return the failures that the agent names, and the ends of the workers of this machine that did not fail."""
    found = []
    first_rank = next(rank - failure.local_rank for rank, failure in known.items())
    agent_ended_some = any(failure.exitcode != -signal.SIGTERM for failure in known.values())
    for local_rank in range(local_world_size):
        rank = first_rank + local_rank
        # The agent names a record only where there is one, and a process that was killed leaves its stack alone.
        folders = sorted(logs.glob(f"*/attempt_*/{local_rank}"), key=_attempt)
        end = read_end(folders[-1], rank, local_rank) if folders else None
        failure = known.get(rank)
        # The agent also ends a worker whose script is over and whose interpreter is still shutting down.
        is_over = end is not None and agent_ended_some
        if failure is None or (is_over and failure.exitcode == -signal.SIGTERM):
            found += [end] if end is not None else []
            continue
        moment, text = read_record(folders[-1] / "error.json") if folders else (None, "")
        # The agent rounds the time at which it noticed the end down to seconds.
        noticed = min(float(failure.timestamp) + 1.0, time.time())
        found.append(Failure(rank, local_rank, failure.pid, failure.exitcode, moment or noticed, text))
    return found
