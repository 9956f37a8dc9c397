"""Start processes below the launcher, wait for them, and leave none behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from accelerate._base.constants import PREEMPTED_EXIT_CODE
from accelerate.config import env
from accelerate.launch import children
from accelerate.launch.failure import Failure, read_record, report
from accelerate.launch.kernel import OutOfMemoryKills
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.run import cannot_start
from accelerate.launch.signals import Stop, handled


class _Stopped(BaseException):
    """The launcher was told to stop; not an Exception, so that nothing on the way takes it for a failure."""


def watch(plan: LaunchPlan) -> int:
    """Start the processes of a plan and return the exit code of the run."""
    with tempfile.TemporaryDirectory(prefix="accelerate-launch-") as folder:
        for name, content in plan.files.items():
            Path(folder, name).write_text(content)
        children.adopt_orphans()
        try:
            return _RUNNERS[plan.mode](plan, folder)
        finally:
            children.end_all()


def _run_elastic(plan: LaunchPlan, folder: str) -> int:
    from accelerate.launch.agent import run_agent

    if plan.elastic is None:
        raise AssertionError("a plan of the elastic mode has its options")
    argv, environment = plan.in_folder(folder)
    return run_agent(argv, environment, plan.elastic, folder=folder, quiet=plan.quiet)


def _run_command(plan: LaunchPlan, folder: str) -> int:
    argv, environment = plan.in_folder(folder)
    stop = Stop(plan.seconds_to_end)
    memory = OutOfMemoryKills.now()
    with handled(stop, lambda number: _Stopped()):
        code = _wait(argv, {**env.items(), **environment}, stop)
    if code == PREEMPTED_EXIT_CODE:
        return code  # the script was stopped for now, and has said so
    if stop.exit_code is not None:
        return stop.exit_code
    if code:
        _report_command(plan, code, Path(folder) / "failures", memory)
    return code if code >= 0 else 128 - code


def _wait(argv: tuple[str, ...], environment: dict[str, str], stop: Stop) -> int:
    process: subprocess.Popen[bytes] | None = None
    try:
        # A session of its own: Ctrl-C reaches it once, from here, and not a second time from the terminal.
        process = subprocess.Popen(argv, env=environment, start_new_session=True)
        return process.wait()
    except OSError as error:
        raise cannot_start(argv[0], error) from error
    except _Stopped:
        if process is None:
            return 0
        process.send_signal(stop.number or signal.SIGTERM)
        return process.wait()


def _report_command(plan: LaunchPlan, code: int, records: Path, memory: OutOfMemoryKills) -> None:
    """Report the first worker that left a record, else the command that failed."""
    failures = []
    for path in records.glob("*/error.json"):
        moment, text = read_record(path)
        rank = int(path.parent.name)
        failures.append(Failure(rank, rank, 0, 1, moment or time.time(), text))
    if failures:
        size = sum(1 for _ in records.iterdir())
        sys.stderr.write(report(failures, size, memory, quiet=plan.quiet))
    elif plan.mode == "spawn_command":
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        sys.stderr.write(f"\n{plan.launcher}: `{plan.argv[0]}` ended with {how}; its own lines above say why.\n")


_RUNNERS: Mapping[str, Callable[[LaunchPlan, str], int]] = {
    "exec": _run_command,
    "elastic": _run_elastic,
    "spawn_command": _run_command,
}
