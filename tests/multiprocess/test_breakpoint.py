"""A breakpoint stops all ranks and talks to one, at the line of the caller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import run_group, script_environment

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate.devices.machine import get_free_port

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import sys
from pathlib import Path
import torch
from accelerate import Accelerator

accelerator = Accelerator()
folder, rank = Path(sys.argv[1]), int(sys.argv[2])


def inspect(x):
    accelerator.breakpoint(rank=rank)
    # Whoever is asked at the prompt leaves a file; the others find it only if they have waited.
    return (folder / "asked").exists()


seen = inspect(x=1000 + accelerator.process_index)
total = accelerator.reduce(torch.ones(1), "sum").item()
(folder / f"rank{accelerator.process_index}").write_text(f"{seen} {total}")
"""
COMMANDS = """p "value", x
!(folder / "asked").touch()
n
p "stepped", x
c
"""


def debug(folder: Path, world_size: int, rank: int) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={world_size}", f"--master_port={get_free_port()}"]
    return subprocess.run(
        [sys.executable, *(launcher if world_size > 1 else []), str(script), str(folder), str(rank)],
        env=script_environment(),
        input=COMMANDS,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 1)])
def test_one_rank_is_asked_and_all_go_on(tmp_path: Path, world_size: int, rank: int) -> None:
    done = debug(tmp_path, world_size, rank)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("'value'") == 1
    assert f"('value', {1000 + rank})" in done.stdout
    assert f"('stepped', {1000 + rank})" in done.stdout
    for member in range(world_size):
        assert (tmp_path / f"rank{member}").read_text() == f"True {float(world_size)}"


def asks_a_rank_that_is_not_there() -> str:
    try:
        Accelerator().breakpoint(rank=2)
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_is_not_there() -> None:
    for message in run_group(asks_a_rank_that_is_not_there, 2):
        assert "breakpoint(rank=2) was called in a run of 2 process(es)" in message
