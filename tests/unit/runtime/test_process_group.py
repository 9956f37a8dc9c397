"""A process leaves only when the threads of its gloo group rest, and hangs up on nothing but its group."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accelerate.runtime import current, process_group

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not list its threads")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["named", "unnamed"])
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the threads a name of their own, where torch does, or that of the process."""
    process = Path(f"/proc/self/task/{os.getpid()}/comm")
    before = process.read_text().strip()
    if request.param == "unnamed":
        process.write_text("pt_gloo_runloop")
        monkeypatch.setattr(process_group, "_GLOO_THREAD", "not a name")
    yield
    process.write_text(before)


@pytest.mark.usefixtures("names", "group")
def test_the_threads_are_found_by_their_name() -> None:
    dist.all_reduce(torch.ones(1))
    assert process_group.gloo_activity()
    assert str(os.getpid()) not in process_group.gloo_activity()


@pytest.mark.usefixtures("names", "group")
def test_settling_waits_for_a_thread_at_work() -> None:
    source = torch.ones(30_000_000)
    target = [torch.zeros_like(source)]
    work = dist.all_gather(target, source, async_op=True)
    assert work is not None
    process_group.settle_gloo_threads()
    assert work.is_completed()
    assert target[0].sum() == 30_000_000


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def test_only_the_connections_of_the_group_are_closed_whatever_their_numbers_are_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = process_group._open_sockets()
    gone, kept = connected(), connected()
    monkeypatch.setitem(current.PARTIAL, process_group._SOCKETS, process_group._open_sockets() - before)
    numbers = {connection.fileno() for connection in gone}
    for connection in gone:
        connection.close()
    other = connected()
    assert {connection.fileno() for connection in other} & numbers
    try:
        process_group.close_connections()
        assert kept[1].recv(1) == b""
        other[0].sendall(b"x")
        assert other[1].recv(1) == b"x"
    finally:
        for connection in (*kept, *other):
            connection.close()
