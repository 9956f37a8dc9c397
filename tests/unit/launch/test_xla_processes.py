"""A script in a process for each device, started by a torch_xla that has two: what runs there, and how a failure ends."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.support.launching import launch, launch_command, launch_environment
from tests.support.tpu_machines import write_torch_xla

from accelerate._base.constants import PREEMPTED_EXIT_CODE
from accelerate.launch.failure import Failure, read_failures

# A machine of a pod lets torch_xla start a process for each device, however many it is.
ALL = {"PJRT_DEVICE": "CPU", "ACCELERATE_IN_TPU_POD": "1"}
ONE = {"PJRT_DEVICE": "CPU"}
TOGETHER = {**ONE, "XLA_USE_SPMD": "1"}
FACTS = """
import os
import sys

facts = [__name__, sys.argv, sys.path[0], os.environ.get("STAND_IN_RANK")]
"""
AS_SCRIPT = f"{FACTS}\nprint(f\"{{facts}} {{sys.modules['__main__'].__file__ == __file__}}\")\n"


def start(folder: Path, *words: str, env: dict[str, str] = ALL) -> subprocess.CompletedProcess[str]:
    if not (folder / "packages").exists():
        write_torch_xla(folder / "packages")
    begin = time.monotonic()
    done = launch("--tpu", *words, env=variables(folder, env), cwd=folder)
    assert time.monotonic() - begin < 120, "processes that wait are ended"
    return done


def variables(folder: Path, env: dict[str, str]) -> dict[str, str]:
    paths = f"{folder / 'packages'}:{launch_environment()['PYTHONPATH']}"
    # Unbuffered, a line is written in pieces.
    return {**env, "PYTHONPATH": paths, "PYTHONUNBUFFERED": ""}


# --- what runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env", "ranks"), [(ALL, ["0", "1"]), (ONE, [None])])
def test_a_script_runs_as_by_the_interpreter(tmp_path: Path, env: dict[str, str], ranks: list[str | None]) -> None:
    (tmp_path / "train.py").write_text(AS_SCRIPT)
    done = start(tmp_path, "train.py", "--lr", "1", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    seen = [f"{['__main__', ['train.py', '--lr', '1'], str(tmp_path), rank]} True" for rank in ranks]
    assert sorted(done.stdout.splitlines()) == seen


def test_a_module_runs_as_by_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(FACTS + "print(facts)\n")
    done = start(tmp_path, "-m", "pkg.train", "x")
    assert (done.returncode, done.stderr) == (0, "")
    file = str(tmp_path / "pkg" / "train.py")
    assert sorted(done.stdout.splitlines()) == [str(["__main__", [file, "x"], str(tmp_path), rank]) for rank in "01"]


@pytest.mark.parametrize(
    ("file", "words", "name"),
    [
        ("train.py", ("train.py",), "train"),
        ("train-it.py", ("train-it.py",), "__mp_main__"),
        ("accelerate.launch.py", ("accelerate.launch.py",), "__mp_main__"),
        ("train.py", ("-m", "train"), "train"),
    ],
)
@pytest.mark.parametrize("env", [ALL, ONE, TOGETHER])
def test_a_function_is_called(
    tmp_path: Path, file: str, words: tuple[str, ...], name: str, env: dict[str, str]
) -> None:
    source = f"{FACTS}\ndef main(index):\n    print(f'{{facts[0]}} {{facts[1][1:]}} {{index}}')\n"
    (tmp_path / file).write_text(source)
    done = start(tmp_path, *words, "x", env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{name} ['x'] {rank}" for rank in ("01" if env is ALL else "0")]


@pytest.mark.parametrize("parameters", ["", "words=None", "*words", "*, rate=1"])
def test_a_function_that_needs_nothing_gets_nothing(tmp_path: Path, parameters: str) -> None:
    (tmp_path / "train.py").write_text(
        f"def fit({parameters}):\n    print(locals())\nif __name__ == '__main__': 1 / 0\n"
    )
    done = start(tmp_path, "--main_training_function", "fit", "train.py", env=ONE)
    assert done.returncode == 0, done.stderr


def test_a_function_that_is_not_written_in_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import builtins\nfit = builtins.dir\n")
    assert start(tmp_path, "--main_training_function", "fit", "train.py", env=ONE).returncode == 0


def test_lines_appear_when_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('started')\ntime.sleep(600)\n")
    write_torch_xla(tmp_path / "packages")
    command, environment = launch_command("--tpu", "train.py"), launch_environment(variables(tmp_path, ALL))
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        # Ctrl-C ends the processes, for which torch_xla would wait.
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)
    assert (lines, code) == (["started\n"] * 2, 128 + signal.SIGINT)


# --- how it ends ------------------------------------------------------------------------------------------------------

FAILING = """
import os
import signal
import sys
import time

def main(index):
    if index == 1:
        while not os.path.exists("started"):
            time.sleep(0.01)
        {}
    open("started", "w").close()
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("statement", "code", "how"),
    [
        ("raise ValueError('broken on purpose')", 1, "exit code 1"),
        ("sys.exit(7)", 7, "exit code 7"),
        ("sys.exit('a reason')", 1, "exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL, sent from outside"),
    ],
)
def test_one_that_fails_ends_the_others_and_is_told_of_last(
    tmp_path: Path, statement: str, code: int, how: str
) -> None:
    (tmp_path / "train.py").write_text(FAILING.format(statement))
    done = start(tmp_path, "train.py")
    assert done.returncode == code
    told = done.stderr.rpartition("-" * 100)[2]
    assert re.search(rf"rank 1 of 2 failed on .* \(local rank 1, process \d+\): {how}", told)
    assert "ended after it: rank 0" in told
    assert "worker.py" not in told
    if "raise" in statement:
        assert told.endswith("    raise ValueError('broken on purpose')\nValueError: broken on purpose\n")
        assert told.count("  File ") == 1
    if "reason" in statement:
        assert "a reason\n" in done.stderr


def test_a_quiet_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING.format("raise ValueError('broken')"))
    assert "Traceback" not in start(tmp_path, "--quiet", "train.py").stderr.rpartition("-" * 100)[2]


def test_one_process_fails_as_without_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def main():\n    raise ValueError('broken')\nmain()\n")
    done = start(tmp_path, "train.py", env=ONE)
    plain = subprocess.run(
        [*launch_command()[:1], str(tmp_path / "train.py")], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stderr) == (plain.returncode, plain.stderr)
    (tmp_path / "train.py").write_text("import sys\nsys.exit(7)\n")
    assert start(tmp_path, "train.py", env=ONE).returncode == 7


@pytest.mark.parametrize(("end", "code"), [("0", 0), (str(PREEMPTED_EXIT_CODE), PREEMPTED_EXIT_CODE)])
def test_processes_that_end_in_order_are_no_failure(tmp_path: Path, end: str, code: int) -> None:
    # The second one still has to save.
    script = f"import sys, time, os\ntime.sleep(int(os.environ['STAND_IN_RANK']))\nprint('saved')\nsys.exit({end})\n"
    (tmp_path / "train.py").write_text(script)
    done = start(tmp_path, "train.py")
    assert (done.returncode, done.stdout, done.stderr) == (code, "saved\nsaved\n", "")


def test_a_process_that_ends_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    write_torch_xla(tmp_path / "packages")
    (tmp_path / "packages" / "torch_xla" / "runtime.py").write_text("import os\nos._exit(3)\n")
    done = start(tmp_path, "train.py")
    assert done.returncode == 1
    assert "A process of torch_xla ended before it began, and left no record of why." in done.stderr


def test_records_of_several_processes(tmp_path: Path) -> None:
    assert read_failures(tmp_path / "none") == ([], 0)
    (tmp_path / "stop").mkdir()
    for rank in (4, 5):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "process.json").write_text(
            f'{{"pid": {rank}0, "local_rank": {rank - 4}, "world_size": 8}}'
        )
    assert read_failures(tmp_path) == ([], 8)
    (tmp_path / "4" / "process.json").write_text("")  # it was ended while it wrote
    assert read_failures(tmp_path) == ([], 8)
    (tmp_path / "5" / "exit_code").write_text("-11")
    (tmp_path / "5" / "fault.txt").write_text("Fatal Python error: Segmentation fault\n")
    ((found,), world_size) = read_failures(tmp_path)
    assert world_size == 8
    assert found == Failure(5, 1, 50, -11, found.time, "Fatal Python error: Segmentation fault")
