"""Private parts of torch: a missing one stops the feature that needs it, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.tensor.experimental import _attention
from torch.utils.data._utils import pin_memory

from accelerate._base.errors import UnsupportedTorchError
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime import torch_private
from accelerate.runtime.torch_private import NEWEST_TESTED_TORCH, OLDEST_TORCH, private

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("owner", "place"),
    [
        (torch.autograd, "torch.autograd"),
        ("torch.autograd", "torch.autograd"),
        ("torch._not_there", "torch._not_there"),
        (nn.Linear, "torch.nn.modules.linear.Linear"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
    ],
)
def test_an_error_names_attribute_and_version(owner: Any, place: str) -> None:
    with pytest.raises(UnsupportedTorchError, match=re.escape(f"torch {torch.__version__} has no {place}._gone")):
        private(owner, "_gone")


def unscale() -> None:
    scaler = SharedGradScaler("cpu")
    scaler.agree_on_overflow = True
    scaler.unscale_(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


def run_in_backward() -> None:
    with torch_private.mode_in_backward(torch.overrides.BaseTorchFunctionMode()):
        pass


FEATURES: list[tuple[Any, str, Callable[[], object]]] = [
    (distributed_c10d, "_get_default_store", torch_private.default_store),
    (torch.autograd, "_engine_run_backward", run_in_backward),
    (
        torch,
        "_has_compatible_shallow_copy_type",
        lambda: torch_private.keeps_identity(torch.ones(1), torch.device("cpu")),
    ),
    (torch.amp.GradScaler, "_unscale_grads_", unscale),
    (pin_memory, "pin_memory", lambda: torch_private.pin_batch([1])),
    (_attention, "set_rotate_method", lambda: torch_private.set_context_rotation("allgather")),
    (
        checkpoint_wrapper,
        "checkpoint_wrapper",
        lambda: torch_private.checkpoint_activations(nn.Linear(1, 1), offload=False),
    ),
]


@pytest.mark.parametrize(("owner", "name", "use"), FEATURES, ids=[name for _, name, _ in FEATURES])
def test_a_feature_without_its_attribute_raises(
    owner: Any, name: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(UnsupportedTorchError, match=rf"\.{name},"):
        use()


LOOP = """
import importlib, sys
for place in sys.argv[1:]:
    module, _, name = place.rpartition(".")
    delattr(importlib.import_module(module), name)
import torch
from accelerate import Accelerator, init_empty_weights
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for batch in loader:
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
with init_empty_weights():
    assert torch.nn.Linear(2, 1).weight.is_meta
"""


def test_what_needs_no_private_attribute_works_without_them() -> None:
    missing = [
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.offload_wrapper",
        "torch.distributed.tensor.experimental._attention.set_rotate_method",
        "torch.utils.data._utils.pin_memory.pin_memory",
    ]
    run = subprocess.run([sys.executable, "-c", LOOP, *missing], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_tested_versions_are_those_that_are_installed_and_required() -> None:
    def pinned(file: str) -> tuple[int, ...]:
        (version,) = re.findall(r"^torch==([\d.]+)$", (ROOT / file).read_text(), re.MULTILINE)
        return tuple(int(part) for part in version.split(".")[:2])

    assert (pinned("constraints-xla.txt"), pinned("constraints-newest.txt")) == (OLDEST_TORCH, NEWEST_TESTED_TORCH)
    assert f'"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"' in (ROOT / "pyproject.toml").read_text()
