"""The soak (`make soak`) in small: a run whose processes are killed ends as one that nobody disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"

pytestmark = pytest.mark.multiprocess


def test_a_killed_run_ends_as_one_that_was_not_killed(tmp_path: Path) -> None:
    sizes = ["--steps", "2400", "--save-every", "50", "--kills", "1", "--seed", "1", "--minutes", "10"]
    command = [sys.executable, str(SOAK), *sizes, "--output", str(tmp_path / "soak.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["step"], report["samples"], report["kills"]) == (2400, 19200, 1)
    assert report["fewest"] == report["most"] == 24
