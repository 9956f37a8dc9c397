"""Make, break and remake the default process group."""

from __future__ import annotations

import atexit
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from accelerate.config import env
from accelerate.devices.machine import is_loopback, listen_on_loopback
from accelerate.runtime import current, rank_sources
from accelerate.runtime.current import Topology
from accelerate.runtime.torch_private import default_store

_OPTIONS = "_group_options"
_SOCKETS = "_group_sockets"
_DESCRIPTORS = Path("/proc/self/fd")
_THREADS = Path("/proc/self/task")
_GLOO_THREAD = "pt_gloo_runloop"
_SLEEPING = "S"
_SETTLE_POLL_SECONDS = 0.001
_SETTLE_SECONDS = 5.0


def join(backend: str, topology: Topology, options: dict[str, Any]) -> dict[str, Any]:
    """Make the default process group, and return what is needed to break and remake it.

    Processes that left a group meet again at the store of that group: a new one at the same address may be made by one
    process while another still holds, and is about to close, the old one.
    """
    place = (os.getpid(), env.get("MASTER_ADDR"), env.get("MASTER_PORT"), topology)
    before = _open_sockets()
    kept = {key: value for key, value in options.items() if key in ("timeout", "device_id")}
    if current.RENDEZVOUS.get("place") == place:
        _rejoin({"backend": backend, **kept}, topology.rank, topology.world_size)
    else:
        dist.init_process_group(backend=backend, **{**options, **_loopback_store(topology, options)})
        current.RENDEZVOUS.update(place=place, store=default_store(), groups=1)
    if backend == "gloo":
        _leave_at_exit(os.getpid())
    return {_OPTIONS: {"backend": backend, **kept}, _SOCKETS: _open_sockets() - before}


def _loopback_store(topology: Topology, options: dict[str, Any]) -> dict[str, Any]:
    """Return further arguments for the group: a store on the loopback address, where all processes meet at one.

    torch would let rank 0 listen on all interfaces. Under torch's agent, and so under this library's launcher, the agent
    holds the store and every process is a client.
    """
    address, port = env.get("MASTER_ADDR", ""), env.integer("MASTER_PORT", 0)
    is_given = not options.keys().isdisjoint(("init_method", "store"))
    if is_given or not is_loopback(address) or env.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return {}
    listener = None
    if topology.rank == 0:
        # A store that this program has opened at the port before is shared, as torch does it.
        with suppress(OSError):
            listener = listen_on_loopback(port, address)
    store = TCPStore(
        address,
        port,
        topology.world_size,
        topology.rank == 0,
        options.get("timeout", default_pg_timeout),
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
        use_libuv=env.get("USE_LIBUV", "1") == "1",
    )
    # torch adds the same prefix to stores that it opens itself.
    return {"store": PrefixStore("default_pg", store), "rank": topology.rank, "world_size": topology.world_size}


@cache
def _leave_at_exit(process: int) -> None:
    """Let a program that ends without leaving its gloo group leave it.

    The group's threads run on in an interpreter that is shutting down, and now and then abort the process there.
    """

    def leave_of_this_process() -> None:
        if os.getpid() == process:
            leave()

    atexit.register(leave_of_this_process)


def join_alone(backend: str) -> None:
    """Make a process group of this process alone, unless there is a group: some engines cannot do without."""
    if not dist.is_initialized():
        rank_sources.keep_gloo_on_loopback()
        dist.init_process_group(backend=backend, store=HashStore(), rank=0, world_size=1)
        if backend == "gloo":
            _leave_at_exit(os.getpid())


def _rejoin(options: dict[str, Any], rank: int, world_size: int) -> None:
    rendezvous = current.RENDEZVOUS
    fresh = PrefixStore(f"accelerate/group/{rendezvous['groups']}", rendezvous["store"])
    dist.init_process_group(**options, store=fresh, rank=rank, world_size=world_size)
    rendezvous["groups"] += 1


def can_remake() -> bool:
    """Return whether this library made the group of this process and knows its connections."""
    return bool(current.PARTIAL.get(_SOCKETS))


def leave(group: dist.ProcessGroup | None = None) -> None:
    """Destroy the default group, or this one, if there is any.

    A model that was wrapped for the group holds it alive. When that model goes, the interpreter waits for the group's
    threads; one of them that still has a tensor to free would wait for the interpreter, for ever.
    """
    settle_gloo_threads()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group(group)


def reachable_devices(group: dist.ProcessGroup | None = None) -> set[str]:
    """Return the types of the devices whose tensors the default group, or this one, exchanges."""
    # Such as "cpu:gloo,DEVICE:BACKEND" for a group over two kinds of devices.
    return {entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")}


def store() -> Store:
    """Return the key-value store through which the processes met; it works while collectives are blocked."""
    return default_store()


def close_connections() -> None:
    """Close this process's connections of the default group, so that peers blocked in a collective get an error.

    Destroying the group is not enough: a model that was wrapped for it keeps its connections open.
    """
    for number, _ in current.PARTIAL.get(_SOCKETS, frozenset()) & _open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if _is_pair(connection):
                connection.shutdown(socket.SHUT_RDWR)


def remake() -> None:
    """Replace the default group by a new one of the same processes; every process must call it."""
    runtime = current.runtime()
    leave()
    before = _open_sockets()
    _rejoin(current.PARTIAL[_OPTIONS], runtime.rank, runtime.world_size)
    current.PARTIAL[_SOCKETS] = _open_sockets() - before
    current.forget_all()


def _open_sockets() -> frozenset[tuple[int, int]]:
    """Return this process's open sockets, each as its number and its inode; empty where the system does not list them.

    A number alone says little: a thread of gloo closes the sockets of a broken group some time later, and the next
    socket that is opened anywhere takes over the number.
    """
    if not _DESCRIPTORS.is_dir():
        return frozenset()
    found = set()
    for entry in _DESCRIPTORS.iterdir():
        with suppress(OSError):
            number = int(entry.name)
            status = os.fstat(number)
            if stat.S_ISSOCK(status.st_mode):
                found.add((number, status.st_ino))
    return frozenset(found)


def _is_pair(connection: socket.socket) -> bool:
    """Return whether a socket connects two ranks; the one to the rendezvous must stay open."""
    rendezvous_port = env.integer("MASTER_PORT", 0)
    with suppress(OSError):
        return rendezvous_port not in (connection.getpeername()[1], connection.getsockname()[1])
    return False


def gloo_activity() -> dict[str, tuple[str, str]]:
    """Return the state of each thread and how often it went to sleep; empty where the system does not say."""
    found = {}
    for task in _gloo_threads():
        # A thread may end while it is looked at.
        with suppress(OSError):
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            found[task.name] = (fields["State"].split()[0], fields["voluntary_ctxt_switches"].strip())
    return found


def _gloo_threads() -> list[Path]:
    """Return the threads of gloo groups.

    torch 2.9 and 2.10 leave them the name of the process, which some other threads have that are not Python's. These
    are at rest too when a process leaves, so they are waited for as well.
    """
    names = {}
    for task in _THREADS.iterdir() if _THREADS.is_dir() else ():
        with suppress(OSError):
            names[task] = (task / "comm").read_text().strip()
    named = [task for task, name in names.items() if name == _GLOO_THREAD]
    # The main thread of a forked process has the number of its parent's in Python 3.11.
    of_python = {str(os.getpid()), *(str(thread.native_id) for thread in threading.enumerate())}
    unnamed = names.get(_THREADS / str(os.getpid()))
    return named or [task for task, name in names.items() if name == unnamed and task.name not in of_python]


def settle_gloo_threads() -> None:
    """Return once no thread of a gloo group is at work, or after a few seconds.

    Such a thread frees the tensors of a collective shortly after the collective is over, and needs the interpreter for
    that. If the interpreter is gone by then, the process aborts ("terminate called without an active exception"); if it
    waits for that thread, as it does when a DDP model goes that was the last to hold the group, both wait for ever.
    torch 2.9 to 2.13 see to neither.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    before = gloo_activity()
    while time.monotonic() < deadline:
        time.sleep(_SETTLE_POLL_SECONDS)  # lets go of the interpreter: whoever waits for it wakes up, and is seen to
        now = gloo_activity()
        if now == before and all(state == _SLEEPING for state, _ in now.values()):
            return
        before = now
