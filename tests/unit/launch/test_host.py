"""What the launcher finds out about this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from accelerate.devices.machine import Machine, interface_of, only_address
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


def test_a_name_of_this_machine_that_leads_to_its_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"node-a": "127.0.0.1", "node-b": "10.0.0.5"}
    monkeypatch.setattr(Host, "address_towards", lambda host, name: ways.get(name))
    monkeypatch.setattr("accelerate.launch.host.only_address", lambda: "10.0.0.6")
    host = Host({})
    assert [host.is_own_name(name) for name in ("node-a", "node-b", "127.0.0.1", "unknown")] == [
        True,
        False,
        False,
        False,
    ]
    assert host.outer_address("node-b") == "10.0.0.5"
    assert host.outer_address("node-a") == "10.0.0.6"
    ways["203.0.113.1"] = "10.0.0.7"
    assert host.outer_address("node-a") == "10.0.0.7"


def test_the_only_network_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def card(*addresses: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(family=socket.AF_INET, address=address) for address in addresses]

    cards = {"lo": card("127.0.0.1"), "eth0": card("10.0.0.1", "192.168.0.1")}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    address = only_address()
    assert address is not None
    assert interface_of(address) == "eth0"
    cards["eth1"] = card("10.1.0.1")
    assert only_address() is None


def test_a_machine_without_several_accelerators_needs_no_link_variables() -> None:
    assert Host({}).link_variables(Machine("cuda", 1)) == {}
