"""Two machines, each a network namespace of its own, train together under `accelerate launch` on both."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.launching import launch
from tests.support.machines import TwoMachines, two_machines

pytestmark = pytest.mark.multiprocess

TRAIN = """
import json, os, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
inputs = torch.arange(32.0).reshape(32, 1) / 32
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, 3 * inputs), batch_size=16 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(4):
    for features, wanted in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(features), wanted))
        optimizer.step()
        optimizer.zero_grad()
seen = accelerator.gather_for_metrics(torch.cat([features for features, _ in loader]))
facts = {
    "rank": accelerator.process_index,
    "local_rank": accelerator.local_process_index,
    "size": accelerator.num_processes,
    "main": os.environ.get("MASTER_ADDR"),
    "seen": len(seen),
    "weight": accelerator.unwrap_model(model).weight.item(),
}
sys.stdout.write(json.dumps(facts) + "\\n")
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    with two_machines("10.77.31") as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def facts_of(runs: list[subprocess.CompletedProcess[str]]) -> list[dict[str, object]]:
    assert [run.returncode for run in runs] == [0] * len(runs), [run.stderr for run in runs]
    return [json.loads(line) for run in runs for line in run.stdout.splitlines() if line.startswith("{")]


def options(address: str, rank: int, backend: str, script: Path) -> list[str]:
    words = ["--cpu", "--num_processes", "4", "--num_machines", "2", "--machine_rank", str(rank)]
    words += ["--main_process_ip", address, "--main_process_port", "29411", "--rdzv_backend", backend]
    return [*words, str(script)]


def test_machines_without_ranks_meet_at_the_one_that_has_the_address(machines: TwoMachines, script: Path) -> None:
    common = [
        "--cpu",
        "--num_processes",
        "2",
        "--num_machines",
        "2",
        "--rdzv_backend",
        "c10d",
        "--main_process_port",
        "29412",
    ]
    words = [*common, "--main_process_ip", machines.addresses[0], str(script)]
    found = facts_of(machines.run(dict.fromkeys((0, 1), words)))
    assert sorted(str(fact["rank"]) for fact in found) == ["0", "1"]
    # An address that no machine has.
    words = [
        *common,
        "--main_process_ip",
        machines.addresses[0][:-1] + "9",
        "--rdzv_conf",
        "read_timeout=2",
        str(script),
    ]
    (missing,) = machines.run({0: words})
    assert missing.returncode != 0
    assert f"{machines.addresses[0][:-1]}9:29412" in missing.stderr
    assert "Traceback" not in missing.stderr
    assert "frame #" not in missing.stderr


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_train_one_model(machines: TwoMachines, script: Path, backend: str) -> None:
    runs = machines.run({rank: options(machines.addresses[0], rank, backend, script) for rank in (0, 1)})
    found = facts_of(runs)
    assert len({fact["rank"] for fact in found}) == 4
    assert sorted(fact["local_rank"] for fact in found) == [0, 0, 1, 1]  # two on each machine
    assert {(fact["size"], fact["seen"]) for fact in found} == {(4, 32)}
    alone = launch("--cpu", str(script))
    (expected,) = facts_of([alone])
    for fact in found:
        assert fact["weight"] == pytest.approx(expected["weight"], abs=1e-6)
