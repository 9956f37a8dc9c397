"""Several launchers that meet: machines, the nodes of a Slurm job, and mpirun."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import launch, launch_command, launch_environment
from tests.support.processes import without_gloo_notes

from accelerate.devices.machine import get_free_port

pytestmark = pytest.mark.multiprocess

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
MEET = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, int(os.environ["RANK"]))
sys.stdout.write(f"met {os.environ['RANK']} {os.environ['LOCAL_RANK']} {everyone}\\n")
dist.destroy_process_group()
"""


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    path = tmp_path / "facts.py"
    line = "sys.stdout.write(json.dumps({name: os.environ.get(name) for name in names}) + '\\n')"
    path.write_text(f"import json, os, sys\nnames = {NAMES!r}\n{line}\n")
    return path


@pytest.fixture
def meet(tmp_path: Path) -> Path:
    path = tmp_path / "meet.py"
    path.write_text(MEET)
    return path


def launch_all(runs: list[tuple[list[str], dict[str, str]]], codes: list[int] | None = None) -> list[str]:
    """Run launchers beside each other and return what each printed; all succeed unless other codes are given."""
    processes = [
        subprocess.Popen(
            launch_command(*words),
            env=launch_environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words, env in runs
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == (codes or [0] * len(runs)), outputs
    return [without_gloo_notes(output) for output, _ in outputs]


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_machines_meet(meet: Path, backend: str) -> None:
    port = str(get_free_port())
    common = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--rdzv_backend", backend]
    common += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    outputs = launch_all([([*common, "--machine_rank", str(rank), str(meet)], {}) for rank in (0, 1)])
    assert sorted(outputs) == ["met 0 0 [0, 1]\n", "met 1 0 [0, 1]\n"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("backend", "seconds"), [("static", "timeout"), ("c10d", "read_timeout=2,join_timeout")])
def test_a_machine_that_finds_no_other_ends_with_one_sentence(
    meet: Path, backend: str, seconds: str, rank: int
) -> None:
    port = str(get_free_port())
    common = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--rdzv_backend", backend]
    common += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, "--rdzv_conf", f"{seconds}=2"]
    done = launch(*common, "--machine_rank", str(rank), str(meet))
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in without_gloo_notes(done.stderr)
    assert "Traceback" not in done.stderr
    assert "frame #" not in done.stderr


@pytest.mark.parametrize(
    ("backend", "pair"), [("static", "timeout=x"), ("c10d", "join_timeout=nan"), ("c10d", "is_host=perhaps")]
)
def test_a_setting_of_the_rendezvous_that_torch_cannot_read(meet: Path, backend: str, pair: str) -> None:
    words = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--rdzv_backend", backend, "--rdzv_conf", pair]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(get_free_port())]
    done = launch(*words, *(["--machine_rank", "0"] if backend == "static" else []), str(meet))
    assert done.returncode == 2
    assert pair in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("backend", ["static", "c10d"])
@pytest.mark.parametrize("failing", [0, 1])
def test_no_machine_waits_for_one_that_failed_after_the_others_were_done(
    tmp_path: Path, backend: str, failing: int
) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n"
        "done = Path(__file__).with_name('done')\n"
        "if sys.argv[1] == 'fail':\n"
        "    while not done.exists():\n        time.sleep(0.02)\n"
        "    time.sleep(2)\n    raise ValueError('late')\ndone.touch()\n"
    )
    common = ["--cpu", "--num_processes", "2", "--num_machines", "2", "--rdzv_backend", backend]
    common += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(get_free_port())]
    words = [str(script), "pass"], [str(script), "fail"]
    runs = [([*common, "--machine_rank", str(rank), *words[rank == failing]], {}) for rank in (0, 1)]
    launch_all(runs, codes=[int(rank == failing) for rank in (0, 1)])


def slurm(task: int, tasks: int, nodes: int) -> dict[str, str]:
    per_node = tasks // nodes
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % per_node),
        "SLURM_NODEID": str(task // per_node),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_STEP_NODELIST": "localhost",
    }


def test_tasks_of_srun_are_the_workers(meet: Path) -> None:
    port = str(get_free_port())
    words = ["--cpu", "--main_process_port", port, str(meet)]
    outputs = launch_all([(words, slurm(task, 2, 2)) for task in (0, 1)])
    assert outputs == ["met 0 0 [0, 1]\n", "met 1 0 [0, 1]\n"]


def test_one_task_a_node_starts_the_share_of_its_node(facts: Path) -> None:
    words = ["--cpu", "--num_processes", "4", "--main_process_port", str(get_free_port()), str(facts)]
    outputs = launch_all([(words, slurm(task, 2, 2)) for task in (0, 1)])
    found: list[dict[str, Any]] = [json.loads(line) for output in outputs for line in output.splitlines()]
    assert sorted((int(each["RANK"]), int(each["LOCAL_RANK"])) for each in found) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["MASTER_ADDR"]) for each in found} == {
        ("4", "2", "localhost")
    }


def test_a_port_that_is_taken(facts: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        named = launch("--cpu", "--num_processes", "2", "--main_process_port", port, str(facts))
        assert named.returncode == 2
        assert f"main_process_port={port} (flag --main_process_port)" in named.stderr
        replaced = launch("--cpu", "--num_processes", "2", str(facts), env={"MASTER_PORT": port})
        assert replaced.returncode == 0, replaced.stderr
        assert "a free one takes its place" in replaced.stderr
        assert len(replaced.stdout.splitlines()) == 2


@pytest.fixture
def as_root() -> dict[str, str]:
    """Return the variables with which Open MPI starts for any user and on any number of cores."""
    path = f"{os.environ['PATH']}{os.pathsep}{sysconfig.get_path('scripts')}"
    if shutil.which("mpirun", path=path) is None:
        pytest.skip("mpirun is neither on the PATH nor in this environment")
    return {
        "PATH": path,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def test_mpirun_starts_the_workers(meet: Path, tmp_path: Path, as_root: dict[str, str]) -> None:
    script = tmp_path / "mpi.py"
    script.write_text(
        "import sys, torch\nfrom accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), 'sum')\n"
        "sys.stdout.write(f'total {total.item()} {accelerator.num_processes}\\n')\n"
        "accelerator.end_training()\n"
    )
    done = launch("--cpu", "--num_processes", "2", "--mpirun_hostfile", "localhost", str(script), env=as_root)
    assert sorted(done.stdout.splitlines()) == ["total 3.0 2"] * 2, done.stderr


def test_the_first_failure_under_mpirun(tmp_path: Path, as_root: dict[str, str]) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n    raise ValueError('broken on purpose')\n"
        "time.sleep(600)\n"
    )
    done = launch("--cpu", "--num_processes", "2", "--mpirun_hostfile", "localhost", str(script), env=as_root)
    assert done.returncode != 0
    assert "rank 1 of 2 failed" in done.stderr
    assert done.stderr.splitlines()[-1] == "ValueError: broken on purpose"
