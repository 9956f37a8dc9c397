"""Rendezvous of several machines: by rank, or in any order through torch's c10d backend.

The underscored names are those of torch 2.9 to 2.15.
"""

from __future__ import annotations

import hmac
import io
import pickle
import socket
import time
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from accelerate._base.errors import ConfigurationError
from accelerate.config import env
from accelerate.devices.machine import owns_address

RUN_TOKEN = "ACCELERATE_RUN_TOKEN"
_SIGNATURE_BYTES = 32
_SECONDS_BETWEEN_ATTEMPTS = 0.2
# Everything that the state of a rendezvous consists of besides strings, numbers and containers.
_STATE_CLASSES = {
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState"),
    ("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_NodeDesc"),
    ("datetime", "datetime"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("builtins", "set"),
}


def handler_of_machines(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler for machines that meet at a store which one of them holds.

    Raises:
        ConfigurationError: The store cannot be reached.
    """
    if parameters.backend == "static":
        plain: Any = create_rdzv_handler(parameters)
        seconds = int(plain.timeout.total_seconds())
        return _RestartableRendezvous(
            plain.master_addr, plain.master_port, plain.rank, plain.world_size, plain.run_id, seconds
        )
    try:
        backend, store = _open_store(parameters)
    except RendezvousConnectionError as error:
        raise ConfigurationError(
            f"This machine could not reach the rendezvous at {parameters.endpoint}. Check that the machine with that "
            "address runs the same command and that no firewall blocks the port, or name the first machine with "
            "--machine_rank 0."
        ) from error
    return create_handler(store, CheckedBackend(backend, env.get(RUN_TOKEN, "")), parameters)


def _open_store(parameters: RendezvousParameters) -> tuple[RendezvousBackend, Store]:
    """Return the backend and its store, which is held by the machine that has the address of the rendezvous.

    torch compares the address with those that the machine's own name leads to, often 127.0.1.1 alone.
    """
    if parameters.get("store_type", "tcp").strip().lower() != "tcp":
        return c10d.create_backend(parameters)
    address, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=c10d.DEFAULT_PORT)
    is_host = parameters.get_as_bool("is_host")
    if is_host or (is_host is None and owns_address(address)):
        parameters.config["is_host"] = "True"
        try:
            return c10d.create_backend(parameters)
        except RendezvousConnectionError:
            # Without a rank, another launcher on this machine may hold the store.
            if is_host:
                raise
    parameters.config["is_host"] = "False"
    _await_listener(address, port, parameters.get_as_int("read_timeout", 60) or 60)
    return c10d.create_backend(parameters)


def _await_listener(address: str, port: int, seconds: int) -> None:
    """Wait until something listens there: torch's own client writes its C++ stack to the terminal at every attempt.

    Raises:
        RendezvousConnectionError: Nothing does in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > deadline:
                raise RendezvousConnectionError(str(error)) from error
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)


class CheckedBackend(RendezvousBackend):
    """Backend whose state is checked before torch unpickles it, which would run any code that it holds.

    Anyone who can connect to the store can write to it. Only the classes of a rendezvous state are accepted, and with
    a token only a state that was signed with it.

    Args:
        token: The secret that all machines of the run share; empty for none.
    """

    def __init__(self, backend: RendezvousBackend, token: str) -> None:
        self._backend = backend
        self._token = token.encode()

    @property
    def name(self) -> str:
        return self._backend.name

    def get_state(self) -> tuple[bytes, Any] | None:
        found = self._backend.get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        found = self._backend.set_state(self._signature(state) + state, token)
        return None if found is None else (self._checked(found[0]), *found[1:])

    def _signature(self, state: bytes) -> bytes:
        return hmac.digest(self._token, state, "sha256") if self._token else b""

    def _checked(self, content: bytes) -> bytes:
        size = _SIGNATURE_BYTES if self._token else 0
        state = content[size:]
        if not hmac.compare_digest(content[:size], self._signature(state)):
            raise RendezvousStateError(
                f"The rendezvous state was not written with the {RUN_TOKEN} of this machine. Set the same value on all machines."
            )
        try:
            _StateUnpickler(io.BytesIO(state)).load()
        except RendezvousStateError:
            raise
        except Exception as error:
            raise RendezvousStateError("The rendezvous state is corrupt.") from error
        return state


class _StateUnpickler(pickle.Unpickler):
    """Unpickler that loads the classes of a rendezvous state only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STATE_CLASSES:
            raise RendezvousStateError(f"The rendezvous state contains {module}.{name}, which is not part of one.")
        return super().find_class(module, name)


class _RestartableRendezvous(StaticTCPRendezvous):
    """Rendezvous of machines that have ranks, with a new store for the workers of each attempt.

    torch uses the same store for every attempt: there the workers find the addresses of those that were before them.
    """

    _attempts = 0
    _fresh: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank != 0 and self._attempts == 0:
            _await_listener(self.master_addr, self.master_port, int(self.timeout.total_seconds()))
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
