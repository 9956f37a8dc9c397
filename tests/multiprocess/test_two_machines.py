"""Two machines, each a network namespace of its own, train together under `accelerate launch` on both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.launching import launch, launch_command, launch_environment

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
CARD = "joint0"  # each namespace has one of this name
ADDRESSES = ("10.77.31.1", "10.77.31.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


def obstacle() -> str | None:
    """Return why no namespaces can be made here."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of iproute2"
    probe = f"accelerate-probe-{os.getpid()}"
    try:
        ip("netns", "add", probe)
        ip("netns", "delete", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"
    return None


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """Join two namespaces by a pair of virtual network cards; each sees its own loopback and the other's address."""
    why = obstacle()
    if why is not None:
        pytest.skip(why)
    names = (f"accelerate-a-{os.getpid()}", f"accelerate-b-{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", CARD, "netns", names[0], "type", "veth", "peer", "name", CARD, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", CARD)
            ip("-n", name, "link", "set", CARD, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def run_on(machines: tuple[str, str], words: list[list[str]]) -> list[subprocess.CompletedProcess[str]]:
    """Run a launcher on each machine at the same time."""
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", machine, *launch_command(*arguments)],
            # By its host name each would find its own loopback address; gloo takes the card that it is told.
            env=launch_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine, arguments in zip(machines, words, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out, err)
        for process, (out, err) in zip(processes, outputs, strict=True)
    ]


def facts_of(runs: list[subprocess.CompletedProcess[str]]) -> list[dict[str, object]]:
    assert [run.returncode for run in runs] == [0] * len(runs), [run.stderr for run in runs]
    return [json.loads(line) for run in runs for line in run.stdout.splitlines() if line.startswith("{")]


def options(rank: int, backend: str, script: Path) -> list[str]:
    words = ["--cpu", "--num_processes", "4", "--num_machines", "2", "--machine_rank", str(rank)]
    words += ["--main_process_ip", ADDRESSES[0], "--main_process_port", "29411", "--rdzv_backend", backend]
    return [*words, str(script)]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_train_one_model(machines: tuple[str, str], script: Path, backend: str) -> None:
    runs = run_on(machines, [options(rank, backend, script) for rank in (0, 1)])
    found = facts_of(runs)
    assert len({fact["rank"] for fact in found}) == 4
    assert sorted(fact["local_rank"] for fact in found) == [0, 0, 1, 1]  # two on each machine
    assert {(fact["size"], fact["seen"]) for fact in found} == {(4, 32)}
    alone = launch("--cpu", str(script))
    (expected,) = facts_of([alone])
    for fact in found:
        assert fact["weight"] == pytest.approx(expected["weight"], abs=1e-6)
