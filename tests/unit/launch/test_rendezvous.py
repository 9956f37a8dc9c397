"""The rendezvous of several machines: which states are accepted, and which machine holds the store."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from accelerate.devices.machine import owns_address
from accelerate.launch.rendezvous import CheckedBackend


def real_state() -> bytes:
    """Return the state of a rendezvous in which every field is used."""
    state, node = _RendezvousState(), _NodeDesc("worker-1", 1, 0)
    now = datetime.datetime.now(datetime.timezone.utc)
    state.deadline, state.participants, state.last_heartbeats = now, {node: 0}, {node: now}
    state.wait_list.add(node)
    state.redundancy_list.add(node)
    return pickle.dumps(state)


class Planted:
    """Object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_state_comes_back_as_it_was_written(token: str) -> None:
    plain = C10dRendezvousBackend(HashStore(), "run")
    backend = CheckedBackend(plain, token)
    state = real_state()
    written = backend.set_state(state)
    assert written is not None
    assert (written[0], written[2]) == (state, True)
    read = CheckedBackend(plain, token).get_state()
    assert read is not None
    assert read[0] == state
    assert backend.set_state(state, read[1]) is not None


def test_code_in_a_state_does_not_run(tmp_path: Path) -> None:
    plain = C10dRendezvousBackend(HashStore(), "run")
    plain.set_state(pickle.dumps(Planted(tmp_path / "planted")))
    backend = CheckedBackend(plain, "")
    with pytest.raises(RendezvousStateError, match="Path"):
        backend.get_state()
    with pytest.raises(RendezvousStateError, match="Path"):
        backend.set_state(real_state())
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", pickle.dumps(print), real_state()[:-3]])
def test_a_corrupt_state_is_refused(content: bytes) -> None:
    plain = C10dRendezvousBackend(HashStore(), "run")
    plain.set_state(content)
    with pytest.raises(RendezvousStateError):
        CheckedBackend(plain, "").get_state()


@pytest.mark.parametrize("other", ["", "another"])
def test_a_state_without_the_token_of_the_run_is_refused(other: str) -> None:
    plain = C10dRendezvousBackend(HashStore(), "run")
    CheckedBackend(plain, other).set_state(real_state())
    with pytest.raises(RendezvousStateError, match="ACCELERATE_RUN_TOKEN"):
        CheckedBackend(plain, "secret").get_state()


def test_a_machine_knows_the_addresses_of_its_interfaces() -> None:
    own = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries if "." in entry.address]
    assert own
    assert all(owns_address(address) for address in own)
    assert not any(owns_address(address) for address in ("192.0.2.254", "no-such-machine.invalid", "10.0..1"))
