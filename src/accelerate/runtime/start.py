"""Start this process: find its rank, choose its device, join its group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice, log_once
from accelerate.config import env
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.runtime import current, process_group, rank_sources
from accelerate.runtime.current import Runtime, Topology
from accelerate.runtime.torch_private import NEWEST_TESTED_TORCH

GroupChoice = Callable[[bool, str | None], tuple[str | None, DistributedType]]
"""Choose the backend of the process group and the label of the run, given `cpu` and the backend asked for."""


def choose_group(cpu: bool, wanted: str | None) -> tuple[str | None, DistributedType]:
    """Return the backend of the process group, None without a group, and the label of the run.

    Args:
        cpu: Use the CPU though an accelerator may be there.
        wanted: The backend that was asked for.
    """
    backend = choose_backend(cpu).value
    if expected_topology(backend).world_size > 1:
        existing = str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else None
        return wanted or existing or backend.group_backend, backend.label
    # Programs ask by this label whether they are on XLA devices, also for one.
    return None, backend.label if backend.records_operations else DistributedType.NO


def start(
    *,
    cpu: bool = False,
    group_options: Mapping[str, Any] | None = None,
    together: bool = False,
    choose_group: GroupChoice = choose_group,
) -> Runtime:
    """Start this process and return its runtime; a process that is started already keeps what it has.

    Args:
        cpu: Use the CPU though an accelerator may be there.
        group_options: Arguments of `torch.distributed.init_process_group`; None values count as not given.
        together: Drive all devices from this process, where the hardware has that.
        choose_group: Returns backend and label; without a backend this process runs alone.
    """
    found = current.active()
    if found is not None:
        return found
    options = {key: value for key, value in (group_options or {}).items() if value is not None}
    choice = choose_backend(cpu)
    backend = choice.value
    if together:
        backend.use_together()
    topology = expected_topology(backend)
    if topology.rank == 0:
        _report_untested_torch()
    options["backend"], label = choose_group(cpu, options.get("backend"))
    if options["backend"] is None and topology.world_size > 1:
        topology = Topology(source=f"a run labelled {label.value}")
    device = _choose_device(backend, topology)
    for name, value in backend.process_variables:
        env.put(name, value)
    group = _join(topology, device, options) if topology.world_size > 1 else {"backend": None}
    group_backend = group["backend"]
    backend.set_device(device)
    if group_backend is not None and device.type == registry.get("cpu").type:
        _share_cores(topology)
    started = Runtime(
        **vars(topology),
        device=device,
        backend=backend,
        group_backend=group_backend,
        reason=choice.reason,
    )
    current.install(
        started,
        **group,
        _cpu=cpu,
        debug=env.flag("ACCELERATE_DEBUG_MODE"),
        device=device,
        distributed_type=label,
        fork_launched=env.flag("FORK_LAUNCHED"),
        local_process_index=topology.local_rank,
        num_processes=topology.world_size,
        process_index=topology.rank,
    )
    return started


def _report_untested_torch() -> None:
    """Log once that the installed torch is newer than the tested ones; a patch release is not."""
    if Version(torch.__version__).release[:2] > NEWEST_TESTED_TORCH:
        log_once(
            __name__,
            f"torch {torch.__version__} is newer than {'.'.join(map(str, NEWEST_TESTED_TORCH))}, the newest release that "
            "this version of accelerate was tested with. A feature that does not work with it raises an error.",
        )


def expected_topology(backend: DeviceBackend) -> Topology:
    """Return the ranks that this process has, or will have when it is started."""
    return current.active() or _existing_group() or _own_ranks(backend) or rank_sources.detect()


def _existing_group() -> Topology | None:
    """Take ranks from a process group that the program made itself."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    found = rank_sources.detect()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (found.rank, found.world_size) == (rank, world_size):
        return found
    return Topology(rank, world_size, rank, world_size, "the process group of the program")


def _own_ranks(backend: DeviceBackend) -> Topology | None:
    """Take ranks from the runtime of the hardware, where it has its own."""
    found = rank_sources.detect()
    ranks = backend.ranks(found.local_rank, found.local_world_size)
    return None if ranks is None else Topology(*ranks, f"the {backend.type} runtime", f"{backend.type}://")


def choose_backend(cpu: bool) -> Choice[DeviceBackend]:
    """Return the hardware that this process uses, or is to use, and why."""
    found = current.active()
    if found is not None:
        return Choice(found.backend, found.reason)
    if cpu or env.flag("ACCELERATE_USE_CPU"):
        return Choice(registry.get("cpu"), "the CPU was asked for")
    forced = env.get("ACCELERATE_TORCH_DEVICE")
    if forced:
        return Choice(registry.get(forced), f"ACCELERATE_TORCH_DEVICE is {forced!r}")
    return registry.default()


def _choose_device(backend: DeviceBackend, topology: Topology) -> torch.device:
    forced = env.get("ACCELERATE_TORCH_DEVICE")
    if forced and registry.get(forced).type == backend.type:
        return torch.device(forced)
    return backend.device(topology.local_rank if topology.world_size > 1 else None)


def _join(topology: Topology, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Make the process group, or check that the one that is there fits, and return its facts."""
    wanted: str = options.pop("backend")
    if dist.is_initialized():
        have = str(dist.get_backend())
        if wanted not in have:
            raise ConfigurationError(
                f"The backend {wanted!r} was asked for, but the process group of this program uses {have!r}. "
                f"Leave the backend out, or pass backend={wanted!r} where the group is made."
            )
        return {"backend": have}
    if topology.init_method is None:
        rank_sources.publish(topology)
    else:
        options.setdefault("init_method", topology.init_method)
        options.update(rank=topology.rank, world_size=topology.world_size)
    if wanted == "nccl":
        options.setdefault("timeout", timedelta(minutes=10))
        options.setdefault("device_id", device)
    return {"backend": wanted, **process_group.join(wanted, topology, options)}


def _share_cores(topology: Topology) -> None:
    """Give each process of this machine its share of the cores, unless the user has said how many threads to use."""
    if env.get("OMP_NUM_THREADS") is None:
        import psutil

        cores = psutil.cpu_count(logical=False) or 1
        torch.set_num_threads(max(1, cores // topology.local_world_size))
