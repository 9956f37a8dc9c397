"""What a launch will do, as a value: the command, its environment, and how it is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["exec", "elastic", "spawn_command"]

# As long as Slurm and Kubernetes leave a job to save its state.
SECONDS_TO_END = 30.0

# Stands in a command for the folder into which the files of a plan are written.
FILES = "@accelerate-files@"


@dataclass(frozen=True)
class ElasticOptions:
    """The arguments of torch's elastic agent on this machine."""

    nproc_per_node: int
    num_nodes: int = 1
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = "localhost:0"
    rdzv_configs: Mapping[str, str] = field(default_factory=dict)
    run_id: str = "none"
    role: str = "default"
    max_restarts: int = 0
    monitor_interval: float = 0.1
    log_dir: str | None = None
    tee: str = "0"
    local_addr: str | None = None
    seconds_to_end: float = SECONDS_TO_END


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that starting a run needs, decided before anything is started.

    Args:
        mode: `exec` puts the command in the place of the launcher, `elastic` starts it on several processes under
            torch's elastic agent, `spawn_command` starts another launcher and waits for it.
        environment: Variables that are set on top of those of this process.
        quiet: Say in one line that a worker failed, without its traceback.
        files: Names and contents of files that the command needs; `FILES` in the command stands for their folder.
        seconds_to_end: How long a command may take to end when it is told to.
    """

    mode: Mode
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    notes: tuple[str, ...] = ()
    elastic: ElasticOptions | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    launcher: str = ""
    quiet: bool = False
    seconds_to_end: float = SECONDS_TO_END

    def in_folder(self, folder: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return command and environment with the folder of the files filled in."""
        argv = tuple(word.replace(FILES, folder) for word in self.argv)
        values = {name: text.replace(FILES, folder) for name, text in self.environment.items()}
        return argv, values
