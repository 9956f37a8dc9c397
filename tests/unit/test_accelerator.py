"""The front door on one process: what it says of itself, and that it loads only the parts of torch that it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.support.logs import logged
from tests.support.processes import script_environment

from accelerate import Accelerator
from accelerate._base.errors import UsageError

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


def test_what_a_run_on_one_cpu_says_of_itself() -> None:
    accelerator = Accelerator()
    loader = torch.utils.data.DataLoader([0, 1, 2, 3])
    assert not accelerator.multi_device
    assert not accelerator.fp8_enabled
    assert not accelerator.has_fp8_handler
    assert accelerator.should_save_model
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, torch.nn.Linear(1, 1)) is loader
    assert accelerator.deepspeed_plugin is None
    assert not accelerator.is_fsdp2


def test_a_rank_along_an_axis_needs_axes() -> None:
    accelerator = Accelerator()
    with pytest.raises(UsageError, match=r"'dp_shard'.*no parallelism_config"):
        _ = accelerator.data_parallel_shard_rank


def test_whole_sequences_without_context_parallelism() -> None:
    accelerator = Accelerator()
    tokens = torch.arange(8).reshape(1, 8)
    with logged("cp_size is 1"), accelerator.maybe_context_parallel(buffers=[tokens]):
        assert tokens.tolist() == [list(range(8))]
