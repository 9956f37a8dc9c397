"""Command lines of torchrun with the first word replaced, on real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from tests.support.launching import facts_of, launch, launch_command, launch_environment

from accelerate._base.imports import is_torch_version
from accelerate.devices.machine import get_free_port

pytestmark = pytest.mark.multiprocess
needs_newer_torch = pytest.mark.skipif(is_torch_version("<", "2.10"), reason="torch 2.9 does not have the option")

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
RANKS += ("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")
FACTS = f"""
import json, os, sys
facts = {{name: os.environ.get(name) for name in {RANKS}}}
facts |= {{"argv": sys.argv[1:], "name": __name__, "run": os.environ.get("TORCHELASTIC_RUN_ID")}}
sys.stdout.write(json.dumps(facts) + chr(10))
sys.stderr.write(f"error of {{facts['RANK']}}" + chr(10))
"""
TRAIN = """
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
sys.stdout.write(f"total {total.item()} {accelerator.num_processes} {accelerator.device}" + chr(10))
accelerator.end_training()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(FACTS)
    return path


def by_torchrun(*words: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    done = subprocess.run(command, env=launch_environment(), timeout=600, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc_per_node=2"],
        ["--standalone", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--role=trainer"],
        ["--nproc-per-node", "auto"],
        ["--nproc_per_node", "1"],
        ["--nnodes", "1:1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "seven"],
    ],
    ids=" ".join,
)
def test_a_line_of_torchrun_starts_the_same_processes(words: list[str], script: Path) -> None:
    done = launch(*words, str(script), "--lr", "1")
    assert done.returncode == 0, done.stderr
    ours, theirs = facts_of(done.stdout), facts_of(by_torchrun(*words, str(script), "--lr", "1"))
    named = [facts["run"] for facts in (*ours, *theirs)]
    assert named == ["seven"] * len(named) if "seven" in words else len(set(named)) == 2
    for facts in (*ours, *theirs):
        del facts["run"]
    assert ours == theirs
    assert len(ours) in (1, psutil.cpu_count(), 2)


@pytest.mark.parametrize(
    "words",
    [("--nproc_per_node=2",), ("--standalone", "--nnodes=1", "--nproc-per-node=2"), ("--master_port", "free")],
)
def test_the_processes_train_together(words: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "meet.py"
    path.write_text(TRAIN)
    if "free" in words:
        words = ("--nproc_per_node=2", "--master_addr=127.0.0.1", "--master_port", str(get_free_port()))
    done = launch(*words, str(path))
    assert done.stdout.splitlines() == ["total 3.0 2 cpu"] * 2, done.stderr


def test_accelerators_that_are_asked_for_and_not_there_are_refused(script: Path) -> None:
    done = launch("--multi_gpu", "--nproc_per_node=2", str(script))
    assert (done.returncode, done.stdout) == (2, "")
    assert "multi_gpu=True (flag --multi_gpu) with num_processes=2 (flag --nproc_per_node 2)" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_is_explained_names_the_flag(script: Path) -> None:
    done = launch("--nproc_per_node=2", "--master-port=29555", "--explain", str(script))
    assert "flag --nproc_per_node 2" in done.stdout
    assert "flag --master_port" in done.stdout
    assert "Nothing was started." in done.stdout


# --- logs -------------------------------------------------------------------------------------------------------------


@needs_newer_torch
def test_output_goes_to_files_and_lines_with_a_word_to_one_more(script: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    words = ("--nproc_per_node=2", "-r", "1", "-t", "2", "--log-dir", str(logs), "--rdzv-id", "job")
    done = launch(*words, "--duplicate-stderr-filters", "of 1", str(script))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    (attempt,) = logs.glob("job_*/attempt_0")
    outputs = [(attempt / str(rank) / "stdout.log").read_text() for rank in range(2)]
    assert [facts["RANK"] for output in outputs for facts in facts_of(output)] == ["0", "1"]
    assert (attempt / "0" / "stderr.log").read_text() == "error of 0\n"
    assert "error of 1" in (attempt / "filtered_stderr.log").read_text()
    assert "error of 0" not in (attempt / "filtered_stderr.log").read_text()


def test_output_that_nobody_sees_stays_in_a_folder_that_is_named(script: Path, tmp_path: Path) -> None:
    done = launch("--nproc_per_node=2", "--redirects", "1", str(script), env={"TMPDIR": str(tmp_path)})
    assert done.stdout == ""
    (folder,) = tmp_path.glob("accelerate-logs-*")
    assert f"the output of the workers goes to {folder}" in done.stderr
    assert len(list(folder.glob("*/attempt_0/*/stdout.log"))) == 2
    assert "error of 0" in done.stderr


def test_the_terminal_shows_the_chosen_processes(script: Path) -> None:
    done = launch("--nproc_per_node=2", "--local-ranks-filter", "1", str(script))
    assert [facts["RANK"] for facts in facts_of(done.stdout)] == ["1"]
    assert done.stderr == "error of 1\n"


def test_events_of_the_agent_go_to_a_handler_of_torch(script: Path) -> None:
    done = launch("--nproc_per_node=1", "--event-log-handler", "console", str(script))
    events = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [event["source"] for event in events if event["name"].endswith("SUCCEEDED")] == ["WORKER", "AGENT"]
    wrong = launch("--nproc_per_node=1", "--event-log-handler", "terminal", str(script))
    assert wrong.returncode == 2
    assert "--event_log_handler='terminal' is not registered" in wrong.stderr


def test_a_class_of_ones_own_decides_on_log_files(script: Path, tmp_path: Path) -> None:
    package = tmp_path / "site"
    (package / "own_logs-1.0.dist-info").mkdir(parents=True)
    (package / "own_logs-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: own-logs\nVersion: 1.0\n"
    )
    (package / "own_logs-1.0.dist-info" / "entry_points.txt").write_text(
        "[torchrun.logs_specs]\nown = own_logs:OwnLogs\n"
    )
    (package / "own_logs.py").write_text(
        "import sys\nfrom torch.distributed.elastic.multiprocessing import DefaultLogsSpecs\n\n\n"
        "class OwnLogs(DefaultLogsSpecs):\n    def reify(self, envs):\n"
        "        sys.stderr.write(f'own logs for {len(envs)}' + chr(10))\n        return super().reify(envs)\n"
    )
    done = launch("--nproc_per_node=2", "--logs-specs", "own", str(script), env={"PYTHONPATH": str(package)})
    assert done.stderr.splitlines()[0] == "own logs for 2"
    wrong = launch("--nproc_per_node=2", "--logs-specs", "none", str(script))
    assert wrong.returncode == 2
    assert "--logs_specs='none' is no entry point of the group 'torchrun.logs_specs'" in wrong.stderr


@needs_newer_torch
def test_each_process_sees_its_own_device_alone(tmp_path: Path) -> None:
    path = tmp_path / "seen.py"
    path.write_text(
        "import os, sys\nnames = ('RANK', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')\n"
        "sys.stdout.write(' '.join(os.environ[name] for name in names) + chr(10))\n"
    )
    done = launch("--nproc_per_node=2", "--virtual-local-rank", str(path), env={"CUDA_VISIBLE_DEVICES": "3,5"})
    assert sorted(done.stdout.splitlines()) == ["0 0 3", "1 0 5"], done.stderr


@pytest.mark.skipif(is_torch_version(">=", "2.10"), reason="this torch has the options")
@pytest.mark.parametrize("words", [["--virtual-local-rank"], ["--duplicate-stderr-filters", "of 1"]])
def test_an_option_that_torch_does_not_have_is_refused(words: list[str], script: Path) -> None:
    done = launch("--nproc_per_node=2", *words, str(script))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{words[0][2:].replace('-', '_')} was asked for, and torch 2.9" in done.stderr


# --- machines that come, signals --------------------------------------------------------------------------------------


def started(words: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(launch_command(*words), env=launch_environment(), stdout=pipe, stderr=pipe, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_a_machine_that_comes_later_joins_the_run(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    # Alone it waits for ever; the machine that joins ends the wait, because all begin anew.
    path.write_text(
        "import os, sys, time\nfrom pathlib import Path\nsize, rank = os.environ['WORLD_SIZE'], os.environ['RANK']\n"
        "sys.stdout.write(f'{rank} of {size}' + chr(10))\nsys.stdout.flush()\n"
        "Path(__file__).with_name(f'{rank}-of-{size}').touch()\n"
        "time.sleep(600 if size == '1' else 0)\n"
    )
    words = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-conf=last_call_timeout=1"]
    words += [f"--rdzv-endpoint=localhost:{get_free_port()}", "--rdzv-id=elastic", str(path)]
    first = started(words)
    others = [first]
    try:
        wait_for(tmp_path / "0-of-1", first)
        others.append(started(words))
        outputs = [process.communicate(timeout=600) for process in others]
    finally:
        for process in others:
            process.kill()
            process.wait()
    assert [process.returncode for process in others] == [0, 0], outputs
    lines = [output.splitlines() for output, _ in outputs]
    assert lines[0][0] == "0 of 1"
    assert sorted([lines[0][1], *lines[1]]) == ["0 of 2", "1 of 2"]


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_the_signals_that_end_a_run_can_be_chosen(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "wait.py"
    path.write_text(
        "import os, time\nfrom pathlib import Path\n"
        "Path(__file__).with_name('rank-' + os.environ['RANK']).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    process = started(["--nproc_per_node=2", "--signals-to-handle=SIGTERM,SIGUSR2", str(path)])
    try:
        for rank in range(2):
            wait_for(tmp_path / f"rank-{rank}", process)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, told = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number
    assert f"{number.name}, ending the workers" in told
    assert not any(worker.is_running() for worker in workers)
