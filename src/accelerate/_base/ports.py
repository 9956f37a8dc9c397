"""Network ports of this machine."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_DEFAULT_PORT = 29500
# Linux hands out ports from 32768 on by default, other systems from 49152 on.
_LOWEST, _HIGHEST = 20_000, 32_768
_ATTEMPTS = 20


def is_port_in_use(port: int | str | None = None) -> bool:
    """Say whether something listens on a port of this machine (by default the one of torch.distributed)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", _DEFAULT_PORT if port is None else int(port))) == 0


def get_free_port() -> int:
    """Return a port that is free at this moment.

    It lies below those that the system hands out by itself, so that no connection of another program takes it between
    this moment and its use, and is drawn at random, so that two programs that ask at once get two.
    """
    for _ in range(_ATTEMPTS):
        # Not by the module random: the launcher would load it for this alone, and a seed must not choose the port.
        port = _LOWEST + int.from_bytes(os.urandom(4), "big") % (_HIGHEST - _LOWEST)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
