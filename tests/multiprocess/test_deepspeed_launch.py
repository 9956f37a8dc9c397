"""DeepSpeed's launchers start workers that meet: on this machine, and on two that are network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.launching import launch
from tests.support.machines import CARD, TwoMachines, two_machines

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("deepspeed")]

# Each worker says who it is once all have met; the last argument would not outlive a shell.
WORKER = """
import json, os, sys
import torch.distributed as dist
from accelerate import PartialState

state = PartialState(cpu=True)
everyone = [None] * state.num_processes
dist.all_gather_object(everyone, state.process_index)
names = ("DS_ACCELERATOR", "MASTER_ADDR", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", "MADE_BY_USER")
facts = {name: os.environ.get(name) for name in names}
facts |= {"RANK": state.process_index, "local": state.local_process_index, "met": everyone, "words": sys.argv[1:]}
facts["local_size"] = os.environ.get("LOCAL_WORLD_SIZE")
sys.stdout.write(json.dumps(facts) + "\\n")
sys.stdout.flush()
state.destroy_process_group()
"""
# Each worker trains its share of a small task with the settings of the launcher.
TRAINER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4).sin(), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
losses = []
for batch in data:
    loss = (model(batch) ** 2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
facts = {"RANK": accelerator.process_index, "met": losses, "stage": accelerator.deepspeed_plugin.zero_stage}
facts |= {"type": accelerator.distributed_type.value, "sharded": hasattr(next(model.parameters()), "ds_id")}
sys.stdout.write(json.dumps(facts) + "\\n")
sys.stdout.flush()
accelerator.end_training()
"""
WORDS = ["--name", "a $b; 'c' %n", "--", "x"]
FOLDER = "/a disk/of $5"
STAGE = ["--use_deepspeed", "--zero_stage", "3", "--offload_param_device", "nvme", "--offload_param_nvme_path", FOLDER]


@pytest.fixture(scope="module")
def deepspeed() -> None:
    pytest.importorskip("deepspeed")


@pytest.fixture(scope="module")
def machines() -> Iterator[TwoMachines]:
    with two_machines("10.77.32") as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def facts_of(*runs: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    """Return what the workers said, in rank order; all runs have succeeded."""
    assert [run.returncode for run in runs] == [0] * len(runs), [run.stdout + run.stderr for run in runs]
    lines = [line[line.index("{") :] for run in runs for line in run.stdout.splitlines() if '"met"' in line]
    return sorted((json.loads(line) for line in lines), key=lambda facts: facts["RANK"])


def check(found: list[dict[str, object]], address: str) -> None:
    """Four workers have met, two on each machine, with the variables and words that were given."""
    assert [facts["met"] for facts in found] == [[0, 1, 2, 3]] * 4
    assert [facts["local"] for facts in found] == [0, 1, 0, 1]
    assert {facts["local_size"] for facts in found} == {"2"}
    assert {(facts["DS_ACCELERATOR"], facts["MASTER_ADDR"]) for facts in found} == {("cpu", address)}
    assert {facts["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"] for facts in found} == {FOLDER}
    assert [facts["words"] for facts in found] == [WORDS] * 4


def test_on_a_machine_without_accelerators(script: Path) -> None:
    done = launch(*STAGE, "--num_processes", "2", str(script), *WORDS)
    found = facts_of(done)
    assert [facts["met"] for facts in found] == [[0, 1]] * 2
    assert {facts["DS_ACCELERATOR"] for facts in found} == {"cpu"}
    assert done.stderr.count("DS_ACCELERATOR=cpu lets DeepSpeed compute on the CPU: this machine has ") == 1


@pytest.mark.parametrize("starter", ["standard", "nossh"])
def test_machines_that_are_started_by_hand(machines: TwoMachines, script: Path, starter: str) -> None:
    words = [*STAGE, "--cpu", "--num_processes", "4", "--num_machines", "2", "--deepspeed_multinode_launcher", starter]
    words += ["--main_process_ip", machines.addresses[0], "--main_process_port", "29417"]
    runs = machines.run({rank: [*words, "--machine_rank", str(rank), str(script), *WORDS] for rank in (0, 1)})
    check(facts_of(*runs), machines.addresses[0])


def train_plainly() -> list[float]:
    """Train in one process with the batches of both machines."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for batch in torch.arange(64.0).reshape(4, 4, 4).sin():
        loss = (model(batch) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_two_machines_train(machines: TwoMachines, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    words = ["--use_deepspeed", "--zero_stage", "3", "--num_processes", "2", "--num_machines", "2"]
    words += ["--main_process_ip", machines.addresses[0], "--main_process_port", "29419"]
    found = facts_of(*machines.run({rank: [*words, "--machine_rank", str(rank), str(script)] for rank in (0, 1)}))
    assert [(facts["type"], facts["stage"], facts["sharded"]) for facts in found] == [("DEEPSPEED", 3, True)] * 2
    means = [sum(pair) / 2 for pair in zip(*(facts["met"] for facts in found), strict=True)]  # type: ignore[call-overload]
    assert means == pytest.approx(train_plainly(), abs=1e-6)


def write_hostfile(machines: TwoMachines, folder: Path) -> Path:
    path = folder / "hosts"
    path.write_text("".join(f"{address} slots=3\n" for address in machines.addresses))
    return path


def test_pdsh_starts_both_machines(machines: TwoMachines, script: Path, tmp_path: Path) -> None:
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is not on the PATH")
    ssh = machines.make_ssh(tmp_path / "bin")
    (tmp_path / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={CARD}\n\nMADE_BY_USER=yes\n")
    words = [*STAGE, "--cpu", "--num_processes", "4", "--deepspeed_hostfile", str(write_hostfile(machines, tmp_path))]
    path = f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"
    runs = machines.run({0: [*words, str(script), *WORDS]}, env={"PATH": path}, cwd=tmp_path)
    found = facts_of(*runs)
    check(found, machines.addresses[0])  # as `hostname -I` of the first machine says
    assert {facts["MADE_BY_USER"] for facts in found} == {"yes"}


def test_mpirun_starts_both_machines(machines: TwoMachines, script: Path, tmp_path: Path) -> None:
    path = f"{os.environ['PATH']}{os.pathsep}{sysconfig.get_path('scripts')}"
    if shutil.which("mpirun", path=path) is None:
        pytest.skip("mpirun is neither on the PATH nor in this environment")
    # Root may run it, and reaches the other machine by another program than ssh.
    around = dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    around |= {f"OMPI_{name[5:]}": "1" for name in around}
    around |= {"PATH": path, "PRTE_MCA_plm_ssh_agent": str(machines.make_ssh(tmp_path / "bin"))}
    (tmp_path / ".deepspeed_env").write_text(f"GLOO_SOCKET_IFNAME={CARD}\nMADE_BY_USER=yes\n")
    words = [*STAGE, "--cpu", "--num_processes", "4", "--deepspeed_hostfile", str(write_hostfile(machines, tmp_path))]
    words += ["--deepspeed_multinode_launcher", "openmpi", "--main_process_port", "29418"]
    runs = machines.run({0: [*words, str(script), *WORDS]}, env=around, cwd=tmp_path)
    found = facts_of(*runs)
    check(found, machines.addresses[0])
    assert {facts["MADE_BY_USER"] for facts in found} == {"yes"}
