"""`accelerate launch` as a program, with real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.support.launching import facts_of, launch, launch_command, launch_environment
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from accelerate.devices.machine import get_free_port

pytestmark = pytest.mark.multiprocess

FACTS = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "ACCELERATE_USE_CPU")
facts = {name: os.environ.get(name) for name in names}
facts |= {"pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "path": sys.path[0], "name": __name__}
facts |= {"main": sys.modules["__main__"].__dict__ is globals(), "file": __file__, "torch": "torch" in sys.modules}
# One write a line: workers share the output, and print() writes the end of a line on its own.
sys.stdout.write(json.dumps(facts) + chr(10))
sys.stdout.flush()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(FACTS)
    return path


def with_failure(path: Path, what: str) -> str:
    """Write a script whose rank 1 fails once both ranks run, and whose rank 0 waits for ever."""
    path.write_text(
        "import os, sys, time\nfrom pathlib import Path\n"
        "rank, other = os.environ['RANK'], {'0': '1', '1': '0'}[os.environ['RANK']]\n"
        "here = Path(__file__).parent\n(here / f'ready-{rank}').touch()\n"
        "while not (here / f'ready-{other}').exists():\n    time.sleep(0.02)\n"
        f"def broken():\n    {what}\n"
        "if rank == '1':\n    broken()\ntime.sleep(600)\n"
    )
    return str(path)


# --- one process ------------------------------------------------------------------------------------------------------


def test_one_process_takes_the_place_of_the_launcher(script: Path) -> None:
    process = subprocess.Popen(
        launch_command(str(script), "a b", "--", "--cpu", ""),
        env=launch_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=600)
    [facts] = facts_of(output)
    assert process.returncode == 0
    assert facts["pid"] == process.pid
    assert facts["argv"] == [str(script), "a b", "--", "--cpu", ""]
    assert (facts["path"], facts["name"], facts["torch"]) == (str(script.parent), "__main__", False)


def test_the_launcher_of_one_process_does_not_load_torch(script: Path) -> None:
    # A torch that cannot be imported stands before the real one.
    (script.parent / "torch.py").write_text("raise RuntimeError('torch was imported')")
    path = f"{script.parent}:{launch_environment()['PYTHONPATH']}"
    done = launch(str(script), env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    assert len(facts_of(done.stdout)) == 1


def test_a_program_and_its_exit_code(tmp_path: Path) -> None:
    program = tmp_path / "run.sh"
    program.write_text('#!/bin/sh\necho "program $1"\nexit 9\n')
    program.chmod(0o755)
    done = launch("--no_python", str(program), "x")
    assert (done.returncode, done.stdout) == (9, "program x\n")


# --- several processes ------------------------------------------------------------------------------------------------


def test_the_number_asked_for_is_started(script: Path) -> None:
    done = launch("--cpu", "--num_processes", "2", "--num_cpu_threads_per_process", "3", str(script), "-a", "--", "b c")
    assert done.returncode == 0, done.stderr
    found = facts_of(done.stdout)
    assert [facts["RANK"] for facts in found] == ["0", "1"]
    for facts in found:
        assert (facts["WORLD_SIZE"], facts["LOCAL_WORLD_SIZE"], facts["OMP_NUM_THREADS"]) == ("2", "2", "3")
        assert (facts["argv"], facts["path"]) == ([str(script), "-a", "--", "b c"], str(script.parent))
        assert (facts["name"], facts["main"], facts["file"]) == ("__main__", True, str(script))
        assert facts["ACCELERATE_USE_CPU"] == "True"
        assert facts["torch"] is False
    assert done.stderr == ""


LISTENERS = """
import json, os, psutil, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and accelerator.process_index == 1:
    raise SystemExit(3)
assert accelerator.reduce(torch.ones(1)).item() == 2
launcher = psutil.Process(os.getppid())
if accelerator.is_main_process:
    for process in (launcher, *launcher.children(recursive=True)):
        for entry in process.net_connections(kind="tcp"):
            if entry.status == psutil.CONN_LISTEN:
                print(json.dumps({"address": entry.laddr.ip, "port": entry.laddr.port, "launcher": process == launcher}))
accelerator.wait_for_everyone()
"""


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_run_on_one_machine_listens_on_the_loopback_address_only(tmp_path: Path, backend: str) -> None:
    script = tmp_path / "listeners.py"
    script.write_text(LISTENERS)
    port = () if backend == "c10d" else ("--main_process_port", str(get_free_port()))
    done = launch("--num_processes", "2", "--max_restarts", "1", "--rdzv_backend", backend, *port, str(script))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {entry["address"] for entry in found} == {"127.0.0.1"}
    # The store of this attempt and that of the one before; a listener of gloo in each worker.
    assert [entry["launcher"] for entry in found].count(True) <= 2
    assert [entry["launcher"] for entry in found].count(False) >= 2


@pytest.mark.parametrize(
    "options", [("--rdzv_backend", "nosuch"), ("--log_dir", "/proc/none"), ("--log_dir", "/proc/self")]
)
def test_what_torch_cannot_use_is_refused_in_one_sentence(script: Path, options: tuple[str, str]) -> None:
    done = launch("--cpu", "--num_processes", "2", *options, str(script))
    assert done.returncode != 0
    assert f"{options[0]}={options[1]!r}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_next_launch_removes_what_killed_launchers_left(tmp_path: Path) -> None:
    script, place = tmp_path / "wait.py", tmp_path / "temporary"
    place.mkdir()
    # Without `end=''`, an unbuffered print writes the line break separately.
    script.write_text("import sys, time\nprint('ready\\n', end='', flush=True)\ntime.sleep(float(sys.argv[1]))\n")
    environment = {"TMPDIR": str(place)}
    words = ("--cpu", "--num_processes", "2", str(script))
    runs = [
        subprocess.Popen(
            launch_command(*words, "600"), env=launch_environment(environment), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for run in runs:
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
        assert len(list(place.glob("accelerate-launch-*"))) == 2
        runs[0].kill()
        runs[0].communicate()
        done = launch(*words, "0", env=environment)
        assert done.returncode == 0, done.stderr
        # That of the launcher which still runs.
        assert len(list(place.iterdir())) == 1
    finally:
        for run in runs:
            if run.poll() is None:
                run.terminate()
                run.communicate()
    assert list(place.iterdir()) == []


def test_a_process_that_leaves_the_others_early_is_named(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        "import sys, torch\nfrom accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\naccelerator.wait_for_everyone()\n"
        "if accelerator.process_index == 1:\n    sys.exit(0)\naccelerator.reduce(torch.ones(1))\n"
    )
    done = launch("--num_processes", "2", str(script))
    assert done.returncode == 1, done.stderr
    summary = done.stderr.rpartition("-" * 100)[2]
    assert "rank 1 of 2" in summary
    assert f"sys.exit(0) at {script}:6" in summary
    assert "another machine" not in summary


def test_accumulation_without_deepspeed_is_left_to_the_script(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text("from accelerate import Accelerator\nprint(Accelerator().gradient_accumulation_steps)\n")
    flags = ("--cpu", "--gradient_accumulation_steps", "4", str(script))
    done = launch(*flags)
    assert done.stdout.split() == ["1"], done.stderr
    assert done.stderr.count("--gradient_accumulation_steps changes nothing without DeepSpeed") == 1
    told = launch(*flags, env={"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"})
    assert told.stdout.split() == ["3"], told.stderr


def test_a_module_on_a_port_of_choice(script: Path) -> None:
    done = launch(
        *("--cpu", "--num_processes", "2", "--main_process_port", str(get_free_port()), "-m", "train", "x"),
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr
    for facts in facts_of(done.stdout):
        assert (facts["argv"], facts["path"]) == ([str(script), "x"], str(script.parent))
        assert facts["main"] is True


def test_workers_meet(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(
        "import sys\nimport torch\nfrom accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), 'sum')\n"
        "sys.stdout.write(f'total {total.item()} {accelerator.num_processes} {accelerator.device}' + chr(10))\n"
        "accelerator.end_training()\n"
    )
    done = launch("--cpu", "--num_processes", "2", str(script))
    assert done.stdout.splitlines() == ["total 3.0 2 cpu"] * 2, done.stderr


def test_a_failed_group_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        "import os\nfrom pathlib import Path\n"
        "mark = Path(__file__).with_name('mark' + os.environ['RANK'])\n"
        "if os.environ['RANK'] == '0' and not mark.exists():\n    mark.touch()\n    raise ValueError('once')\n"
        "print(f\"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n\", end='')\n"
    )
    done = launch("--cpu", "--num_processes", "2", "--max_restarts", "1", str(script))
    assert done.returncode == 0, done.stderr
    assert "attempt 1" in done.stdout


@pytest.mark.parametrize("failing", ["0", "1"])
def test_a_failed_group_meets_again_at_a_port_of_choice(tmp_path: Path, failing: str) -> None:
    script = tmp_path / "meet_again.py"
    # Without the library: what the workers find in the store is the launcher's business.
    script.write_text(
        "import os, sys\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo')\ndist.barrier()\n"
        f"if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '{failing}':\n"
        "    os.kill(os.getpid(), 9)\n"
        "dist.barrier()\nsys.stdout.write('met\\n')\ndist.destroy_process_group()\n"
    )
    port = str(get_free_port())
    done = launch("--cpu", "--num_processes", "2", "--max_restarts", "1", "--main_process_port", port, str(script))
    assert (done.returncode, done.stdout) == (0, "met\n" * 2), done.stderr


# --- failures ---------------------------------------------------------------------------------------------------------


def test_the_last_lines_are_the_worker_that_failed(tmp_path: Path) -> None:
    path = with_failure(tmp_path / "fail.py", "raise ValueError('broken on purpose')")
    done = launch("--cpu", "--num_processes", "2", path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    start = max(place for place, line in enumerate(lines) if line.startswith("rank "))
    assert lines[start].startswith("rank 1 of 2 failed on ")
    assert lines[start].endswith("exit code 1")
    ended = lines[start + 1] == "ended after it: rank 0"
    # Before that, torch does not tell of workers that it ended itself.
    assert ended is hasattr(SubprocessContext, "_capture_process_failures")
    trace = lines[start + 1 + ended :]
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1] == f'  File "{path}", line 11, in <module>'
    assert trace[-1] == "ValueError: broken on purpose"
    assert not any("worker.py" in line or "runpy" in line for line in lines)
    assert not any("ChildFailedError" in line for line in lines)


@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        ("os.kill(os.getpid(), 9)", 137, "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", 139, "SIGSEGV"),
        ("sys.exit(7)", 7, "exit code 7"),
    ],
)
def test_other_ways_to_fail(tmp_path: Path, what: str, code: int, told: str) -> None:
    path = with_failure(tmp_path / "fail.py", what)
    done = launch("--cpu", "--num_processes", "2", path)
    assert done.returncode == code
    report = done.stderr[done.stderr.rindex("rank 1 of 2 failed") :]
    assert told in report
    # A kill leaves nothing; the others name the line.
    assert (path in report) == (code != 137)


def test_a_rank_that_only_lost_its_peer_is_not_the_cause(tmp_path: Path) -> None:
    script = tmp_path / "collective.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\n"
        "accelerator.wait_for_everyone()\n"
        "if accelerator.process_index == 1:\n    raise KeyError('cause')\n"
        "accelerator.reduce(torch.ones(2), 'sum')\n"
    )
    done = launch("--cpu", "--num_processes", "2", str(script))
    assert done.stderr.splitlines()[-1] == "KeyError: 'cause'"
    assert "\nrank 1 of 2 failed" in done.stderr


# --- signals ----------------------------------------------------------------------------------------------------------

STUBBORN = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("number", "code", "habit"),
    [
        (signal.SIGTERM, 143, "pass"),
        (signal.SIGINT, 130, "pass"),
        # Such a worker behaves like one that waits inside a collective.
        (signal.SIGINT, 130, STUBBORN),
        (signal.SIGKILL, -9, "pass"),
    ],
)
def test_a_launcher_that_is_stopped_leaves_no_process(
    tmp_path: Path, number: signal.Signals, code: int, habit: str
) -> None:
    script = tmp_path / "wait.py"
    # A child of the worker stands for the worker processes of a loader.
    script.write_text(
        f"import os, signal, subprocess, sys, time\n{habit}\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(f'ready {os.getpid()} {child.pid}\\n', end='', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen(
        launch_command("--cpu", "--num_processes", "2", str(script)),
        env=launch_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()[1:]]
    workers = [psutil.Process(pid) for pid in (pids[:1] + pids[2:3] if number is signal.SIGKILL else pids)]
    assert len(pids) == 4
    try:
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        _, alive = psutil.wait_procs(workers, timeout=20)
        assert alive == []
    finally:
        process.stdout.close()
        for pid in pids:
            if psutil.pid_exists(pid):
                psutil.Process(pid).kill()


def test_the_workers_of_a_restart_meet_at_a_store_of_their_own(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print(f\"{attempt} {os.environ['MASTER_PORT']}\\n\", end='', flush=True)\n"
        "sys.exit(attempt == '0')\n"
    )
    done = launch("--cpu", "--num_processes", "2", "--max_restarts", "1", str(script))
    assert done.returncode == 0, done.stderr
    ports = {attempt: {line for line in done.stdout.splitlines() if line.startswith(attempt)} for attempt in "01"}
    assert [len(found) for found in ports.values()] == [1, 1]
    assert ports["0"].pop().split()[1] != ports["1"].pop().split()[1]


# --- explaining and mistakes ------------------------------------------------------------------------------------------


def test_explaining_starts_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 4\nuse_cpu: true\n")
    for flag in ("--explain", "--dry_run", "--dry-run"):
        done = launch(flag, "--config_file", str(config), "--num_processes", "2", str(script), "x y")
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "started").exists()
    rows = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if line.count("│") == 4}
    assert "2" in rows["num_processes"]
    assert "flag --num_processes" in rows["num_processes"]
    assert "bf16" in rows["mixed_precision"]
    assert "file" in rows["mixed_precision"]
    assert "max_restarts" not in rows
    assert f"script {script} 'x y'" in done.stdout
    assert "ACCELERATE_MIXED_PRECISION=bf16" in done.stdout
    assert "Nothing was started." in done.stdout
    verbose = launch("--explain", "--verbose", "--cpu", "--num_processes", "2", str(script))
    assert "max_restarts" in verbose.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["absent.py"], "'absent.py' does not exist"),
        (["--num_machines", "2", "--num_processes", "2", "--cpu", "train.py"], "Add --main_process_ip"),
        (["--num_procesess", "2", "train.py"], "did you mean --num_processes?"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], told: str, script: Path) -> None:
    done = launch(*words, cwd=script.parent)
    assert done.returncode == 2
    assert done.stdout == ""
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_without_torch() -> None:
    for words in (["--help"], ["launch", "--help"]):
        program = (
            "import sys\nsys.modules['torch'] = None\nfrom accelerate.commands.accelerate_cli import run\n"
            f"sys.exit(run({words!r}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], env=launch_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "usage: accelerate" in done.stdout
