"""A sharded save that is killed loses nothing that was saved before."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.processes import script_environment

from accelerate.checkpointing.catalog import newest_valid
from accelerate.devices.machine import get_free_port

pytestmark = pytest.mark.multiprocess

LOST_PEER = re.compile(r"RuntimeError: .*gloo.*(closed by peer|reset by peer|Broken pipe)")
SCRIPT = """
import os, signal, sys
import torch
import torch.distributed.checkpoint.filesystem as filesystem
from tests.support.sharding import BY_CLASS, Sharded, make_words

folder = sys.argv[1]
accelerator = Sharded(2, BY_CLASS).accelerator()
model = make_words()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
accelerator.backward(model(torch.zeros(2, 3, dtype=torch.int64)).square().mean())
optimizer.step()
accelerator.save_state(folder + "/first")

plain = filesystem.FileSystemWriter.write_data

def write_and_die(self, plan, planner):
    done = plain(self, plan, planner)
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return done

filesystem.FileSystemWriter.write_data = write_and_die
accelerator.save_state(folder + "/second")
"""


def test_a_process_is_killed_while_it_writes_its_shards(tmp_path: Path) -> None:
    folder, script = tmp_path / "checkpoints", tmp_path / "script.py"
    folder.mkdir()
    script.write_text(SCRIPT)
    ranks = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
    }
    said = [tmp_path / f"stderr-{rank}" for rank in range(2)]
    members: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(2):
            environment = script_environment({**ranks, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            with said[rank].open("w") as errors:
                command = [sys.executable, str(script), str(folder)]
                members.append(subprocess.Popen(command, env=environment, stderr=errors))
        assert members[1].wait(240) == -signal.SIGKILL
        # Nobody ends the other one: it hears of it when the connection breaks, and raises what gloo says of that.
        assert members[0].wait(240) == 1, said[0].read_text()
    finally:
        for member in members:
            member.kill()
            member.wait()
    assert LOST_PEER.search(said[0].read_text()), said[0].read_text()
    found = newest_valid(folder)
    assert found.value is not None
    assert found.value.path == folder / "first"
    assert found.value.is_valid
    assert not (folder / "second").exists()
