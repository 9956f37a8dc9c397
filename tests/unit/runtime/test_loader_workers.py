"""Loader workers and signals that go to all processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKERS_FIRST = """
import os, psutil, signal
from torch.utils.data import DataLoader
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
batches = iter(accelerator.prepare(DataLoader(range(64), batch_size=2, num_workers=2)))
next(batches)
assert not accelerator.should_stop
for process in (*psutil.Process().children(), psutil.Process()):
    process.send_signal(signal.SIGTERM)
assert len(list(batches)) == 31
assert accelerator.should_stop
accelerator.end_training()
"""


def test_loader_workers_that_came_before_the_first_read_outlive_a_signal_to_all(tmp_path: Path) -> None:
    script = tmp_path / "workers_first.py"
    script.write_text(WORKERS_FIRST)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
