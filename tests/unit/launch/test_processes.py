"""Commands below the launcher: their exit codes, their signals, and what is told of a failure."""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import psutil
import pytest
from tests.support.processes import script_environment

from accelerate._base.constants import PREEMPTED_EXIT_CODE
from accelerate._base.errors import ConfigurationError
from accelerate.launch import run
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.processes import Shutdown, run_command


def run_shell(folder: Path, commands: str) -> int:
    plan = LaunchPlan("spawn_command", ("mpirun", "train.py"), {}, launcher="mpirun", seconds_to_end=60)
    return run_command(plan, ("/bin/sh", "-c", commands), {"WORD": "given"}, str(folder))


def test_the_exit_code_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_shell(tmp_path, '[ "$WORD" = given ]') == 0
    assert capsys.readouterr().err == ""
    assert run_shell(tmp_path, "exit 7") == 7
    assert capsys.readouterr().err == "\nmpirun: `mpirun` ended with exit code 7; its own lines above say why.\n"
    assert run_shell(tmp_path, "kill -KILL $$") == 137
    assert "`mpirun` ended with SIGKILL" in capsys.readouterr().err


def test_a_script_that_stopped_to_go_on_later_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_shell(tmp_path, f"exit {PREEMPTED_EXIT_CODE}") == PREEMPTED_EXIT_CODE
    assert capsys.readouterr().err == ""


def test_the_worker_that_left_a_record_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        (tmp_path / "failures" / str(rank)).mkdir(parents=True)
    extra = {"py_callstack": "ValueError: broken", "timestamp": "12", "precise_timestamp": 12.5}
    record = tmp_path / "failures" / "1" / "error.json"
    record.write_text(json.dumps({"message": {"message": "E", "extraInfo": extra}}))
    assert run_shell(tmp_path, "exit 1") == 1
    told = capsys.readouterr().err
    assert "rank 1 of 2 failed" in told
    assert told.endswith("ValueError: broken\n")


def _signal_when_waiting(ready: Path, number: signal.Signals) -> None:
    """Send the main thread a signal once the command is ready and the main thread waits for it."""
    main = threading.main_thread().ident
    assert main is not None
    pause = threading.Event()
    # Python 3.11 lists the frames under a lock that other threads need too: a tensor that is collected meanwhile lets go of the
    # interpreter, and both wait for ever.
    gc.disable()
    try:
        while True:
            frames = traceback.extract_stack(sys._current_frames()[main])
            if ready.exists() and any(frame.name == "wait" for frame in frames):
                return signal.pthread_kill(main, number)
            pause.wait(0.001)
    finally:
        gc.enable()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_reaches_the_command(
    tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    ready, heard = tmp_path / "ready", tmp_path / "heard"
    thread = threading.Thread(target=_signal_when_waiting, args=(ready, number), daemon=True)
    thread.start()
    name = number.name.removeprefix("SIG")
    # A shell runs its handler between two commands.
    commands = f"trap 'touch {heard}; exit 3' {name}; touch {ready}; while [ -e {ready} ]; do sleep 0.01; done"
    assert run_shell(tmp_path, commands) == 128 + number
    thread.join()
    assert heard.exists()
    assert f"accelerate launch: {number.name}, ending the workers; again ends them at once" in capsys.readouterr().err
    assert signal.getsignal(number) is before


STUBBORN = """
import sys
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.processes import launch_folder, run_command

command = ("/bin/sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done")
with launch_folder({}) as folder:
    sys.exit(run_command(LaunchPlan("exec", command, {}, seconds_to_end=600), command, {}, folder))
"""


def test_a_second_signal_ends_a_command_that_does_not_listen() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN],
        env=script_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        command = int(launcher.stdout.readline())
        launcher.terminate()
        assert "SIGTERM, ending the workers; again ends them at once" in launcher.stderr.readline()
        launcher.terminate()
        assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
    # What is left of a killed process may wait for its new parent, which can be this one, to ask how it ended.
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(command).status() == psutil.STATUS_ZOMBIE


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    plan = LaunchPlan("exec", ("no-such-program", "x"), {})
    told = r"'no-such-program' cannot be started: No such file.*Install it .*--explain"
    with pytest.raises(ConfigurationError, match=told):
        run(plan, in_place=True)
    with pytest.raises(ConfigurationError, match=told):
        run_command(plan, plan.argv, {}, str(tmp_path))


def test_signals_are_left_alone_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def enter() -> None:
        with Shutdown(1.0).handlers(lambda number: KeyboardInterrupt()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [before]


def test_what_a_program_had_started_before_it_launches_lives_on(tmp_path: Path) -> None:
    own_of_own = tmp_path / "pid"
    own = subprocess.Popen(
        ["/bin/sh", "-c", f"sleep 600 & echo $! > {own_of_own}.new; mv {own_of_own}.new {own_of_own}; wait"]
    )
    try:
        while not own_of_own.exists():
            time.sleep(0.01)
        # What the launch itself leaves behind is ended.
        left = tmp_path / "left"
        assert run(LaunchPlan("exec", ("/bin/sh", "-c", f"sleep 600 & echo $! > {left}"), {})) == 0
        for number in (int(own_of_own.read_text()), own.pid):
            assert psutil.Process(number).status() != psutil.STATUS_ZOMBIE
        with contextlib.suppress(psutil.NoSuchProcess):
            assert psutil.Process(int(left.read_text())).status() == psutil.STATUS_ZOMBIE
    finally:
        for number in (own.pid, int(own_of_own.read_text())):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(number).kill()
        own.wait()
