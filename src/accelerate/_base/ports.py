"""Network ports of this machine."""

from __future__ import annotations

import socket

_DEFAULT_PORT = 29500


def is_port_in_use(port: int | str | None = None) -> bool:
    """Say whether something listens on a port of this machine (by default the one of torch.distributed)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", _DEFAULT_PORT if port is None else int(port))) == 0


def get_free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
