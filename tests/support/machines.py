"""Two machines for tests: network namespaces that are joined by a cable, and an ssh that enters them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.launching import launch_command, launch_environment

CARD = "joint0"  # each namespace has one of this name

_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do case "$1" in -o|-l|-p) shift 2 ;; *) shift ;; esac; done
host=$1; shift
exec nsenter --net="/run/netns/$(cat "$(dirname "$0")/$host")" sh -c "$*"
"""


def ip(*words: str) -> None:
    """Run `ip` of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


def obstacle() -> str | None:
    """Return why no namespaces can be made here."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of iproute2"
    probe = f"accelerate-probe-{os.getpid()}"
    try:
        ip("netns", "add", probe)
        ip("netns", "delete", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    return None


@dataclass(frozen=True)
class TwoMachines:
    """Two namespaces and the address of each, which is its name as well."""

    namespaces: tuple[str, str]
    addresses: tuple[str, str]

    def run(
        self,
        words: Mapping[int, Sequence[str]],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a launcher on some of the machines at the same time, each with its own words."""
        processes = [
            subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.namespaces[machine]}", *launch_command(*arguments)],
                # By its host name each would find its own loopback address; gloo takes the card that it is told.
                env=launch_environment(env),
                cwd=cwd,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for machine, arguments in words.items()
        ]
        try:
            outputs = [process.communicate(timeout=600) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            subprocess.CompletedProcess(process.args, process.returncode, out, err)
            for process, (out, err) in zip(processes, outputs, strict=True)
        ]

    def make_ssh(self, folder: Path) -> Path:
        """Write an `ssh` that runs a command on one of the machines, and return its path."""
        folder.mkdir()
        for address, namespace in zip(self.addresses, self.namespaces, strict=True):
            (folder / address).write_text(namespace)
        program = folder / "ssh"
        program.write_text(_SSH)
        program.chmod(0o755)
        return program


@contextmanager
def two_machines(network: str) -> Iterator[TwoMachines]:
    """Join two namespaces by a pair of virtual network cards; each sees its own loopback and the other's address.

    Args:
        network: The first three numbers of the addresses, such as `10.77.31`.
    """
    why = obstacle()
    if why is not None:
        pytest.skip(why)
    names = tuple(f"accelerate-{network.replace('.', '-')}-{letter}-{os.getpid()}" for letter in "ab")
    addresses = (f"{network}.1", f"{network}.2")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", CARD, "netns", names[0], "type", "veth", "peer", "name", CARD, "netns", names[1])
        for name, address in zip(names, addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CARD)
            ip("-n", name, "link", "set", CARD, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield TwoMachines((names[0], names[1]), addresses)
    finally:
        for name in made:
            ip("netns", "delete", name)
