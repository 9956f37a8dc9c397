"""What the launcher costs: commands that start nothing, one process beside `python`, and two processes beside torchrun."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rounds import alternate, report

PYTHON = sys.executable
ACCELERATE = (PYTHON, "-m", "accelerate.commands.accelerate_cli")
TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def runner(command: Sequence[str]) -> Callable[[], None]:
    def run() -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    return run


def time_of_children() -> float:
    """Return the processor time of all commands so far: other programs on the machine do not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(kind: str, script: Path) -> dict[str, list[float]]:
    launch = [*ACCELERATE, "launch", "--cpu"]
    if kind == "help":
        config = ("config", "default", "--config_file")
        loops = {
            "help": runner([*ACCELERATE, "--help"]),
            "launch help": runner([*ACCELERATE, "launch", "--help"]),
            "config": lambda: runner([*ACCELERATE, *config, str(script.with_name(f"{time.time_ns()}.yaml"))])(),
            "env": runner([*ACCELERATE, "env"]),
        }
        return alternate(loops, 5, 1, time_of_children)
    if kind == "one":
        loops = {"plain": runner([PYTHON, str(script)]), "accelerate": runner([*launch, str(script)])}
        return alternate(loops, 7, 1, time_of_children)
    loops = {
        "plain": runner([*TORCHRUN, str(script)]),
        "accelerate": runner([*launch, "--num_processes", "2", str(script)]),
    }
    return alternate(loops, 4, 1, time.perf_counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("help", "one", "two"), required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "empty.py")
        script.write_text("pass\n")
        series = measure(options.kind, script)
    report(series, unit="s")


if __name__ == "__main__":
    main()
