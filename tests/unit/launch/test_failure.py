"""Which worker failed first, and how that is told."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate.launch.agent import _failures
from accelerate.launch.failure import (
    Failure,
    OutOfMemoryKills,
    _counter,
    exit_code_of,
    first_failure,
    read_record,
    report,
)

NOTHING = OutOfMemoryKills(None, None)


def failure(rank: int, time: float, code: int = 1, text: str = "ValueError: x") -> Failure:
    return Failure(rank, rank, 100 + rank, code, time, text)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([failure(0, 10.4), failure(1, 10.2)], 1),
        # The agent ends the others, and whole seconds put that before the cause.
        ([failure(0, 10.0, -signal.SIGTERM, ""), failure(1, 10.4)], 1),
        # The others lose the peer that was killed before its death is noticed.
        ([failure(0, 10.3, text="RuntimeError: Connection closed by peer"), failure(1, 11.0, -signal.SIGKILL, "")], 1),
        ([failure(0, 10.3, text="OSError: own"), failure(1, 11.0, -signal.SIGSEGV, "")], 1),
        # A worker that does not end is killed, long after the cause.
        ([failure(0, 10.3), failure(1, 41.0, -signal.SIGKILL, "")], 0),
        # Communication libraries abort when a peer is gone.
        ([failure(0, 10.3), failure(1, 10.9, -signal.SIGABRT, "")], 0),
        ([failure(0, 10.0, -signal.SIGTERM, "")], 0),
        # The others lose a peer that was done before them; one that was done is not to blame for another's error.
        ([failure(0, 10.3, text="RuntimeError: Connection closed by peer"), failure(1, 10.0, 0, "sys.exit(0)")], 1),
        ([failure(0, 10.3), failure(1, 10.0, 0, "sys.exit(0)")], 0),
    ],
)
def test_the_failure_that_the_others_follow_from(failures: list[Failure], expected: int) -> None:
    assert first_failure(failures).rank == expected
    assert first_failure(failures[::-1]).rank == expected


def test_the_report_ends_with_the_traceback() -> None:
    text = "Traceback (most recent call last):\n  ...\nValueError: broken\n"
    lines = report([failure(3, 1.0, 1, text), failure(0, 1.0, -15, "")], 4, NOTHING).splitlines()
    assert lines[-3:] == text.splitlines()
    assert lines[-5].startswith("rank 3 of 4 failed on ")
    assert lines[-5].endswith("(local rank 3, process 103): exit code 1")
    assert lines[-4] == "ended after it: rank 0"
    assert "ValueError" not in report([failure(3, 1.0, 1, text)], 4, NOTHING, quiet=True)


def test_a_machine_that_only_lost_its_peers_points_elsewhere() -> None:
    assert "another machine" in report([failure(0, 1.0, 1, "RuntimeError: Connection reset by peer")], 4, NOTHING)


def test_another_machine_is_not_blamed_in_a_run_on_one() -> None:
    text = report([failure(0, 1.0, 1, "RuntimeError: Connection reset by peer")], 2, NOTHING, one_machine=True)
    assert "another machine" not in text
    assert "another process" in text


def record(folder: Path, local_rank: int, name: str, content: dict[str, Any]) -> None:
    place = folder / "run_1" / "attempt_0" / str(local_rank)
    place.mkdir(parents=True)
    (place / name).write_text(json.dumps(content))


def test_a_worker_that_the_agent_ended_after_its_script_is_named(tmp_path: Path) -> None:
    lost = {"extraInfo": {"py_callstack": "RuntimeError: Connection closed by peer", "precise_timestamp": 11.0}}
    record(tmp_path, 0, "end.json", {"pid": 100, "time": 10.0, "text": "sys.exit(0)"})
    record(tmp_path, 1, "error.json", {"message": lost})
    ended = SimpleNamespace(local_rank=0, pid=100, exitcode=-signal.SIGTERM, timestamp=11)
    known = {3: SimpleNamespace(local_rank=1, pid=101, exitcode=1, timestamp=11), 2: ended}
    root = first_failure(_failures(known, tmp_path, 2))
    assert (root.rank, root.exit_code, root.text) == (2, 0, "sys.exit(0)")
    # A signal from elsewhere is a failure of its own.
    (alone,) = _failures({2: ended}, tmp_path, 1)
    assert alone.signal is signal.SIGTERM


def test_a_kill_for_lack_of_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = [failure(1, 1.0, -signal.SIGKILL, "")]
    counted = OutOfMemoryKills(control_group=2, machine=5)
    monkeypatch.setattr(OutOfMemoryKills, "now", classmethod(lambda cls: cls(control_group=3, machine=6)))
    told = report(killed, 2, counted)
    assert "SIGKILL: killed, probably by the kernel for lack of memory" in told
    assert "oom_kill 2 -> 3" in told
    monkeypatch.setattr(OutOfMemoryKills, "now", classmethod(lambda cls: counted))
    assert "SIGKILL, sent from outside" in report(killed, 2, counted)


def test_the_kernel_counters_of_this_machine() -> None:
    now = OutOfMemoryKills.now()
    if not Path("/proc/vmstat").exists():
        pytest.skip("this kernel has no /proc/vmstat")
    assert isinstance(now.machine, int)
    assert now.evidence_since(pid=2**30) is None


def test_a_counter_file(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 7\n")
    assert _counter(events, "oom_kill") == 7
    assert _counter(events, "absent") is None
    assert _counter(tmp_path / "absent", "oom_kill") is None


def test_records(tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    assert read_record(record) == (None, "")
    (tmp_path / "fault.txt").write_text("Fatal Python error: Segmentation fault\n")
    assert read_record(record) == (None, "Fatal Python error: Segmentation fault")
    extra = {"py_callstack": "the stack", "timestamp": "12", "precise_timestamp": 12.5}
    record.write_text(json.dumps({"message": {"message": "E", "extraInfo": extra}}))
    assert read_record(record) == (12.5, "the stack")
    record.write_text('{"message": "only text"}')
    assert read_record(record) == (None, "only text")
    record.write_text('{"message"')
    assert read_record(record)[0] is None


def test_exit_codes() -> None:
    assert exit_code_of([failure(0, 1.0, 0, ""), failure(1, 2.0, 3, "broken pipe")]) == 3
    assert exit_code_of([failure(0, 1.0, 7)]) == 7
    assert exit_code_of([failure(0, 1.0, -9)]) == 137


def test_ways_to_end_without_a_text() -> None:
    told = report([failure(0, 1.0, 4, "")], 1, NOTHING)
    assert "exit code 4" in told
    assert "It left no traceback: what it printed above is all there is." in told
    # Python has no name for most real-time signals.
    told = report([failure(0, 1.0, -40, "")], 1, NOTHING)
    assert "signal 40" in told
    assert exit_code_of([failure(0, 1.0, -40, "")]) == 168


def test_a_kill_that_only_the_machine_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OutOfMemoryKills, "now", classmethod(lambda cls: cls(control_group=2, machine=6)))
    evidence = OutOfMemoryKills(control_group=2, machine=5).evidence_since(1)
    assert evidence == "the kernel counted a kill for lack of memory: oom_kill 5 -> 6"
