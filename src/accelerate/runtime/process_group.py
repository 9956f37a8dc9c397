"""Make, break and remake the default process group."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ..config import env
from . import current
from .torch_private import default_store

_OPTIONS = "_group_options"
_SOCKETS = "_group_sockets"
_GENERATION = "_group_generation"
_DESCRIPTORS = Path("/proc/self/fd")


def join(backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make the default process group, and return what is needed to break and remake it."""
    before = _open_sockets()
    dist.init_process_group(backend=backend, **options)
    kept = {key: value for key, value in options.items() if key in ("timeout", "device_id")}
    return {
        _OPTIONS: {"backend": backend, **kept},
        _SOCKETS: _open_sockets() - before,
        _GENERATION: 0,
    }


def can_remake() -> bool:
    """Return whether this library made the group of this process and knows its connections."""
    return bool(current.PARTIAL.get(_SOCKETS))


def store() -> Store:
    """Return the key-value store through which the processes met; it works while collectives are blocked."""
    return default_store()


def hang_up() -> None:
    """Close this process's connections of the default group, so that peers blocked in a collective get an error.

    Destroying the group is not enough: a model that was wrapped for it keeps its connections open.
    """
    for number in current.PARTIAL.get(_SOCKETS, ()):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if _is_pair(connection):
                connection.shutdown(socket.SHUT_RDWR)


def remake(meeting: Store) -> None:
    """Replace the default group by a new one of the same processes; every process must call it."""
    rank, world_size = current.runtime().rank, current.runtime().world_size
    generation = current.PARTIAL.get(_GENERATION, 0) + 1
    options = current.PARTIAL.get(_OPTIONS, {})
    if dist.is_initialized():
        dist.destroy_process_group()
    before = _open_sockets()
    prefixed = PrefixStore(f"accelerate/group/{generation}", meeting)
    dist.init_process_group(**options, store=prefixed, rank=rank, world_size=world_size)
    current.PARTIAL.update({_SOCKETS: _open_sockets() - before, _GENERATION: generation})
    current.forget_all()


def _open_sockets() -> frozenset[int]:
    """Return the numbers of this process's open sockets; empty where the system does not list them."""
    if not _DESCRIPTORS.is_dir():
        return frozenset()
    found = set()
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                found.add(int(entry.name))
    return frozenset(found)


def _is_pair(connection: socket.socket) -> bool:
    """Return whether a socket connects two ranks; the one to the meeting point must stay open."""
    meeting_port = env.integer("MASTER_PORT", 0)
    with suppress(OSError):
        return meeting_port not in (connection.getpeername()[1], connection.getsockname()[1])
    return False
