"""How Slurm writes lists of hosts and tasks, and the port that the processes of a job meet at."""

from __future__ import annotations

import re
import zlib

from accelerate._base.errors import ConfigurationError


def tasks_of_nodes(counts: str) -> list[int]:
    """Read a list such as `4(x2),3`: the tasks of each node."""
    return [int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """Return the first host of a list such as `gpu[003-005,9],login`.

    Raises:
        ConfigurationError: If the list names none.
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if match is None:
        raise ConfigurationError(
            f"Slurm's node list {nodes!r} names no host, so the processes cannot meet. "
            "Add --main_process_ip, or set MASTER_ADDR, with the first host of the job."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match.group())


def port_of_job(job: str) -> int:
    """Return a port that all processes of a job derive alike and two jobs almost never share."""
    return 15000 + zlib.crc32(job.encode()) % 40000
