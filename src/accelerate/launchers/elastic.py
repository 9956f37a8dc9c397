"""Run a function on the processes of torch's elastic agent and bring back what it returned or how it failed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from accelerate._base.errors import AccelerateError
from accelerate.config import env
from accelerate.launch.agent import launch_config, quieten
from accelerate.launch.failure import Failure, first, read_record, report
from accelerate.launch.kernel import OutOfMemoryKills
from accelerate.launch.plan import ElasticOptions
from accelerate.launchers.worker import PID_FILE, Worker


class ProcessFailedError(AccelerateError, RuntimeError):
    """Report the process that failed first, with its traceback.

    Args:
        rank: The process that failed.
        exit_code: How it ended; negative for a signal.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[ProcessFailedError], tuple[str, int, int]]:
        return type(self), (str(self), self.rank, self.exit_code)


def run_function(worker: Worker, options: ElasticOptions, **more: Any) -> list[Any]:
    """Run it on every process of this machine and return the results by rank.

    Args:
        more: Fields of torch's `LaunchConfig` that the options do not have.

    Raises:
        ProcessFailedError: If a process fails.
    """
    memory = OutOfMemoryKills.now()
    # The kernel of a notebook keeps its own handlers: with those of the agent its stop button would no longer work.
    with (
        tempfile.TemporaryDirectory(prefix="accelerate-") as folder,
        env.patch_environment(torchelastic_signals_to_handle=""),
    ):
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from accelerate.launch import torch_agent

        quieten()
        try:
            results = torch_agent.run(launch_config(options, folder, **more), worker)
        except ChildFailedError as error:
            failures = _failures(error.failures, Path(folder))
        else:
            return [results[rank] for rank in sorted(results)]
    root = first(failures)
    world_size = options.nproc_per_node * options.num_nodes
    raise ProcessFailedError(report([root], world_size, memory).lstrip("\n-"), root.rank, root.exit_code)


def _failures(known: dict[int, Any], folder: Path) -> list[Failure]:
    """Return the failure that the agent names and those of which the other processes of this machine left a record."""
    (rank, named), *_ = known.items()
    first_rank = rank - named.local_rank
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda place: place.stat().st_mtime)
    found = {}
    for place in attempts[-1].iterdir() if attempts else ():
        moment, text = read_record(place / "error.json")
        if moment is not None or text:
            local = int(place.name)
            pid = int((place / PID_FILE).read_text())
            code = named.exitcode if local == named.local_rank else 1
            found[local] = Failure(first_rank + local, local, pid, code, moment or float(named.timestamp), text)
    if named.local_rank not in found:
        found[named.local_rank] = Failure(rank, named.local_rank, named.pid, named.exitcode, float(named.timestamp) + 1)
    return list(found.values())
