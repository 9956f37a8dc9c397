"""DeepSpeed's hostfile and its filters: the machines of a run and the slots that are used on each."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import first_line, number_in, read_limited, shown
from accelerate.launch.host import MOST_OF_HOSTFILE, check_machine

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

# Where DeepSpeed looks when no hostfile is named.
_USUAL_HOSTFILE = Path("/job/hostfile")
_INCLUDE, _EXCLUDE = "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"
_MOST_SLOTS = 10_000
_MOST_ON_ALL = 1_000_000
_EXAMPLE = "`worker-1 slots=8`"
_FILTER_EXAMPLE = "`worker-1@worker-2:0,2`"
# The form that DeepSpeed reads; what follows the number is ignored.
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class HostSlots:
    """A machine of a hostfile.

    Args:
        slots: The numbers of its devices that take part, one process on each.
        place: The file and line that name it.
    """

    name: str
    slots: tuple[int, ...]
    place: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the first slots take part, so that their number says which."""
        return self.slots == tuple(range(len(self.slots)))


@dataclass(frozen=True)
class Machines:
    """The machines of a run, with notes for the user about how they were chosen."""

    hosts: tuple[HostSlots, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_processes(self) -> int:
        """The number of processes on all of them."""
        return sum(len(host.slots) for host in self.hosts)

    @property
    def most_on_one(self) -> int:
        """The most processes that one of them starts."""
        return max(len(host.slots) for host in self.hosts)

    @property
    def are_alike(self) -> bool:
        """Whether all of them start the same number of processes."""
        return len({len(host.slots) for host in self.hosts}) == 1


# --- the machines of a run --------------------------------------------------------------------------------------------


def find_machines(config: RunConfig) -> Machines | None:
    """Return the machines and slots that hostfile, filters and numbers leave; None without a hostfile.

    Raises:
        ConfigurationError: They contradict each other, or the file cannot be read.
    """
    named = config["deepspeed_hostfile"]
    filters = [name for name in (_INCLUDE, _EXCLUDE) if config[name]]
    if not named and not _USUAL_HOSTFILE.is_file():
        if filters:
            raise ConfigurationError(
                f"{filters[0]}={config[filters[0]]!r} ({config.origin(filters[0])}) chooses among the machines of a hostfile, and "
                "none was given. Add --deepspeed_hostfile, or leave the filter out."
            )
        return None
    path = Path(str(named)) if named else _USUAL_HOSTFILE
    hosts = read_hostfile(path, config.origin("deepspeed_hostfile") if named else "where DeepSpeed looks for one")
    for name in filters:
        hosts = (include if name == _INCLUDE else exclude)(hosts, str(config[name]), f"{name} ({config.origin(name)})")
    notes: tuple[str, ...] = ()
    if config.is_given("num_machines"):
        hosts, notes = _first_machines(config, hosts, path)
    hosts, more = _share(config, hosts, filtered=bool(filters))
    return Machines(hosts, notes + more)


def _first_machines(
    config: RunConfig, hosts: tuple[HostSlots, ...], path: Path
) -> tuple[tuple[HostSlots, ...], tuple[str, ...]]:
    """Take the first machines, as many as were asked for."""
    count = int(config["num_machines"])
    given = f"num_machines={count} ({config.origin('num_machines')})"
    if count > len(hosts):
        names = ", ".join(host.name for host in hosts)
        raise ConfigurationError(
            f"{given} is more than the hostfile {str(path)!r} and the filters leave: {names}. "
            f"Write --num_machines {len(hosts)}, or name more machines."
        )
    if count == len(hosts):
        return hosts, ()
    return hosts[:count], (f"Of the {len(hosts)} machines in {path} the first {count} take part: {given}.",)


def _share(
    config: RunConfig, hosts: tuple[HostSlots, ...], *, filtered: bool
) -> tuple[tuple[HostSlots, ...], tuple[str, ...]]:
    """Take as many slots of each machine as the number of processes asks for, all where nobody gave a number."""
    slots = sum(len(host.slots) for host in hosts)
    asked = int(config["num_processes"] or 0)
    if not config.is_given("num_processes") or asked == slots:
        return hosts, ()
    given = f"num_processes={asked} ({config.origin('num_processes')})"
    if filtered and not config.is_typed("num_processes"):
        return hosts, (f"The filter leaves {slots} slots, and as many processes take the place of {given}.",)
    share, rest = divmod(asked, len(hosts))
    if rest or any(len(host.slots) < share for host in hosts):
        listed = ", ".join(f"{host.name} {len(host.slots)}" for host in hosts)
        raise ConfigurationError(
            f"{given} cannot be shared evenly among the slots of the machines: {listed}. "
            f"Write --num_processes {slots}, or give the machines other slots."
        )
    return tuple(replace(host, slots=host.slots[:share]) for host in hosts), ()


# --- the file and its filters -----------------------------------------------------------------------------------------


def read_hostfile(path: Path, origin: str) -> tuple[HostSlots, ...]:
    """Return the machines of a hostfile in their order.

    Args:
        origin: Who named the file, for messages.

    Raises:
        ConfigurationError: The file cannot be read, names no machine, or has a line that is none.
    """
    try:
        lines = read_limited(path.expanduser(), MOST_OF_HOSTFILE).decode().splitlines()
    except (OSError, ValueError, RuntimeError) as error:  # the last two for what is no text, and for a home of nobody
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({first_line(error)})"
        raise ConfigurationError(
            f"deepspeed_hostfile={str(path)!r} ({origin}) {why}, so the machines are unknown. "
            f"Write a file with a line such as {_EXAMPLE} for each machine."
        ) from error
    hosts: dict[str, HostSlots] = {}
    slots = 0
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        place = f"{path}:{number}"
        host = _read_line(text, place)
        if host.name in hosts:
            raise ConfigurationError(
                f"{place}: {text!r} names {host.name!r} a second time, after {hosts[host.name].place}, and a machine has "
                "one line. Leave one of the two out, or add their slots up."
            )
        hosts[host.name] = host
        slots += len(host.slots)
        if slots > _MOST_ON_ALL:
            raise ConfigurationError(
                f"{place}: up to this line {str(path)!r} gives {slots} slots, and no run has more than {_MOST_ON_ALL} "
                "processes. Write the number of devices of each machine."
            )
    if not hosts:
        raise ConfigurationError(
            f"deepspeed_hostfile={str(path)!r} ({origin}) names no machine. Write a line such as {_EXAMPLE} for each."
        )
    return tuple(hosts.values())


def _read_line(text: str, place: str) -> HostSlots:
    match = _LINE.match(text)
    count = number_in(match[2], _MOST_SLOTS) if match is not None else None
    if match is None or not count:
        raise ConfigurationError(
            f"{place}: {shown(text)} is not a machine with a number of slots from 1 to {_MOST_SLOTS}. Write a line such as "
            f"{_EXAMPLE}."
        )
    check_machine(match[1], place)
    return HostSlots(match[1], tuple(range(count)), place)


def include(hosts: Sequence[HostSlots], text: str, origin: str) -> tuple[HostSlots, ...]:
    """Return the machines and slots that a filter names.

    Raises:
        ConfigurationError: The filter cannot be read, or names what the hostfile does not have.
    """
    named = _read_filter(hosts, text, origin)
    chosen = (replace(host, slots=named[host.name] or host.slots) for host in hosts if host.name in named)
    return tuple(chosen)


def exclude(hosts: Sequence[HostSlots], text: str, origin: str) -> tuple[HostSlots, ...]:
    """Return the machines and slots that a filter does not name.

    Raises:
        ConfigurationError: The filter cannot be read, names what the hostfile does not have, or leaves nothing.
    """
    named = _read_filter(hosts, text, origin)
    kept = []
    for host in hosts:
        out = set(named[host.name] or host.slots) if host.name in named else set()
        kept.append(replace(host, slots=tuple(slot for slot in host.slots if slot not in out)))
    left = tuple(host for host in kept if host.slots)
    if not left:
        raise ConfigurationError(
            f"{origin}={text!r} leaves out every slot of the hostfile, so nothing would run. Leave out fewer."
        )
    return left


def _read_filter(hosts: Sequence[HostSlots], text: str, origin: str) -> dict[str, tuple[int, ...]]:
    """Return what a filter names: machines, and slots of each, none for the whole machine."""
    known = {host.name: host for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    for entry in text.split("@"):
        name, colon, listed = entry.strip().partition(":")
        numbers = [word.strip() for word in listed.split(",")] if colon else []
        slots = {slot for slot in map(number_in, numbers) if slot is not None}
        if not name or any(number_in(word) is None for word in numbers):
            raise ConfigurationError(
                f"{origin}={text!r}: {entry!r} is not a machine with or without slots. Write {_FILTER_EXAMPLE}."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or list(known)
            raise ConfigurationError(
                f"{origin}={text!r} names {name!r}, which the hostfile does not have. Write one of its names, such as "
                f"{near[0]!r}."
            )
        missing = slots - set(known[name].slots)
        if missing:
            raise ConfigurationError(
                f"{origin}={text!r} names slot {min(missing)} of {name!r}, which has {len(known[name].slots)} "
                f"({known[name].place}). Write slots from 0 to {len(known[name].slots) - 1}."
            )
        named[name] = tuple(sorted({*named.get(name, ()), *slots}))
    return named


def hostfile_text(hosts: Sequence[HostSlots]) -> str:
    """Return a hostfile with just the slots that take part, or as many as reach up to the last of them."""
    return "".join(f"{host.name} slots={max(host.slots) + 1}\n" for host in hosts)


def filter_text(hosts: Sequence[HostSlots]) -> str | None:
    """Return the filter that picks the slots from `hostfile_text`; None where all of them take part."""
    if all(host.is_whole for host in hosts):
        return None
    return "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)
