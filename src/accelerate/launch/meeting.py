"""Where the processes of a run meet: the address and port of the first one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate.launch.origins import is_typed
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class MeetingPoint:
    """An address and a port, None where the system picks one when the run starts, and what is to say about them."""

    address: str
    port: int | None
    notes: tuple[str, ...] = ()


def on_this_machine(config: RunConfig, site: Site) -> MeetingPoint:
    """Choose the port for processes that are all on this machine.

    Raises:
        ConfigurationError: If a port was typed and something listens on it.
    """
    port = _wanted_port(config)
    if port is None:
        return MeetingPoint(LOOPBACK, None)
    if not site.port_in_use(port):
        return MeetingPoint(LOOPBACK, port)
    if is_typed(config, "main_process_port"):
        raise _busy(config, port)
    note = f"Port {port} ({config.origin('main_process_port')}) is in use on this machine; a free one takes its place."
    return MeetingPoint(LOOPBACK, None, (note,))


def on_many_machines(config: RunConfig, site: Site, *, machine_rank: int) -> MeetingPoint:
    """Choose address and port for several machines, which must all name the same.

    Raises:
        ConfigurationError: If no address is known, or this machine owns the port and something listens on it.
    """
    address = config["main_process_ip"]
    if not address:
        raise ConfigurationError(
            f"num_machines={config['num_machines']!r} ({config.origin('num_machines')}) and no address was given, so "
            "the machines cannot find each other. Add --main_process_ip with the address of the machine with rank 0."
        )
    port = _wanted_port(config) or DEFAULT_PORT
    if machine_rank == 0 and site.port_in_use(port):
        raise _busy(config, port)
    return MeetingPoint(str(address), port)


def fixed_port(point: MeetingPoint, site: Site) -> int:
    """Return the port of a meeting point, a free one where it leaves the choice open."""
    return site.free_port() if point.port is None else point.port


def _wanted_port(config: RunConfig) -> int | None:
    port = config["main_process_port"]
    return int(port) if port and config.is_given("main_process_port") else None


def _busy(config: RunConfig, port: int) -> ConfigurationError:
    return ConfigurationError(
        f"main_process_port={port} ({config.origin('main_process_port')}): something listens on that port of this "
        "machine already. Give another --main_process_port (the same on every machine), or end what listens there."
    )
