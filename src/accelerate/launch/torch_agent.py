"""Torch's elastic agent, with what its own launcher does not offer.

The underscored names are those of torch 2.9 to 2.13; nothing else in this package uses them.
"""

from __future__ import annotations

import dataclasses
import inspect
import signal
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.metrics import initialize_metrics
from torch.distributed.elastic.metrics.api import MetricsConfig
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler
from torch.distributed.launcher.api import LaunchConfig

from accelerate.launch.listeners import Listeners

_SECONDS_TO_CHECK_OUT = 0.5
_SECONDS_WITHOUT_PEERS = 5


class Agent(LocalElasticAgent):
    """An agent that others do not wait for after its workers failed, and that can be told not to start them anew.

    Args:
        listeners: The workers that listen for signals, None if they are not asked to say so.
    """

    def __init__(self, *args: Any, listeners: Listeners | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listeners = listeners

    def give_up_restarts(self) -> None:
        """Take the next failure of a worker as the end of the run."""
        self._remaining_restarts = 0

    def check_out(self) -> None:
        """Tell the agents of other machines, which wait for each other at the end, that this one will not come."""
        if self._store is not None and self._worker_group.group_world_size > 1:
            self._exit_barrier_timeout = _SECONDS_TO_CHECK_OUT
            self._exit_barrier()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Torch 2.9 to 2.13 keeps the store that workers of the first attempt met at: those of the next one would find
        # the addresses of the first there, and now and then try to reach them.
        handler = worker_group.spec.rdzv_handler
        for kept in ("_bootstrap_store_info", "_shared_tcp_store_server"):
            if hasattr(handler, kept):
                setattr(handler, kept, None)
        super()._rendezvous(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        if self._listeners is not None:
            self._listeners.forget_stopped()
            # To a worker that listens SIGTERM is a request to save, which it cannot do without its peers.
            if self._pcontext is not None and self._listeners.processes():
                self._pcontext.close(signal.SIGTERM, _SECONDS_WITHOUT_PEERS)
        super()._stop_workers(worker_group)


class _RestartableRendezvous(StaticTCPRendezvous):
    """Machines that know each other's places, and whose workers get a fresh store each time they are started.

    Torch hands the same store to every attempt: there the workers find the addresses of those that were before them.
    """

    _attempts = 0
    _fresh: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        info = super().next_rendezvous()
        self._attempts += 1
        if self._attempts == 1:
            return info
        key = f"accelerate/port/{self._attempts}"
        if self.rank == 0:
            self._fresh = TCPStore(
                self.master_addr, 0, self.world_size, True, self.timeout, wait_for_workers=False, multi_tenant=True
            )
            info.store.set(key, str(self._fresh.port))
        port = int(info.store.get(key))
        return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(self.master_addr, port))


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
    if config.rdzv_backend != "static":
        return rendezvous_registry.get_rendezvous_handler(parameters)
    plain: Any = create_rdzv_handler(parameters)
    seconds = int(plain.timeout.total_seconds())
    return _RestartableRendezvous(
        plain.master_addr, plain.master_port, plain.rank, plain.world_size, plain.run_id, seconds
    )


def _known(values: dict[str, Any], names: Any) -> dict[str, Any]:
    """Leave out what this version of torch does not have."""
    return {name: value for name, value in values.items() if name in names}


def run(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    arguments: tuple[str, ...] = (),
    *,
    listeners: Listeners | None = None,
    started: Callable[[Agent], None] | None = None,
) -> dict[int, Any]:
    """Start the workers, watch them, and return what they returned by rank.

    Args:
        started: Is called with the agent before it starts them.

    Raises:
        ChildFailedError: If a worker fails and no restart is left.
        SignalException: If a handler of a signal raised it.
    """
    handler = _rendezvous_handler(config)
    fields = {field.name for field in dataclasses.fields(WorkerSpec)}
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    own = {"local_world_size": config.nproc_per_node, "entrypoint": entrypoint, "args": arguments}
    spec = WorkerSpec(**{**_known(shared, fields), **own, "rdzv_handler": handler})
    agent = Agent(
        listeners=listeners,
        spec=spec,
        **_known(shared, inspect.signature(LocalElasticAgent.__init__).parameters),
    )
    if started is not None:
        started(agent)
    closes = True
    try:
        initialize_metrics(MetricsConfig(config.metrics_cfg))
        result = agent.run()
        if result is None:
            return {}
        if result.is_failed():
            agent.check_out()
            raise ChildFailedError(str(entrypoint), result.failures)
        results: dict[int, Any] = result.return_values
        return results
    except SignalException:
        closes = False  # a rendezvous that was closed stays so for all machines
        agent.check_out()
        raise
    finally:
        if closes:
            handler.shutdown()
