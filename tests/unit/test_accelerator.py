"""A run loads only the parts of torch that it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.processes import script_environment

HEAVY = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch._dynamo")


@pytest.mark.parametrize(
    "work",
    [
        "accelerator.prepare(torch.nn.Linear(2, 1))",
        "accelerator.prepare(torch.utils.data.DataLoader(range(4)))",
    ],
)
def test_one_process_does_without_what_shards_models(work: str) -> None:
    code = (
        "import sys, torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        f"{work}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=script_environment({}), capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
