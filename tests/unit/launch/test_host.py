"""What the launcher finds out about this machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from accelerate.devices.machine import Machine
from accelerate.launch.host import Host


def test_numbers_in_variables() -> None:
    host = Host({"RANK": "3", "WORD": "three", "BELOW": "-1"})
    assert [host.integer(name) for name in ("RANK", "WORD", "BELOW", "MISSING")] == [3, None, None, None]


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(3), raising=False)
    assert Host({}).physical_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert Host({}).physical_cores() == 8
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    assert Host({}).physical_cores() == 16


def test_the_version_of_mpi(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text('#!/bin/sh\necho "mpirun (Open MPI) 4.1.4 $1"\n')
    program.chmod(0o755)
    assert Host({}).mpi_version(str(program)) == "mpirun (Open MPI) 4.1.4 --version\n"
    assert Host({}).mpi_version(str(tmp_path / "missing")) == ""


def test_addresses_of_this_machine() -> None:
    host = Host({})
    address = host.address_towards("127.0.0.1")
    assert address == "127.0.0.1"
    interface = host.interface_of(address)
    assert interface in psutil.net_if_addrs()
    assert host.interface_of("203.0.113.77") is None


@pytest.mark.parametrize("name", ["255.255.255.255", "10.0..1"])
def test_an_address_that_cannot_be_reached_or_read(name: str) -> None:
    assert Host({}).address_towards(name) is None


def test_a_machine_without_several_accelerators_needs_no_link_variables() -> None:
    assert Host({}).link_variables(Machine("cuda", 1)) == {}
