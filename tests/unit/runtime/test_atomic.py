"""Files and folders that appear as a whole, and what killed writers leave."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate.runtime import atomic
from accelerate.runtime.atomic import Owner


@pytest.fixture
def running() -> Iterator[Owner]:
    """A process that lives as long as the test."""
    here = Owner.this_process()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    yield replace(here, process=process.pid, started=atomic._start_of(process.pid))
    process.communicate()


@pytest.fixture
def ended() -> Iterator[Owner]:
    """A process that has ended, and that nobody has asked how."""
    here = Owner.this_process()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    started = atomic._start_of(process.pid)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield replace(here, process=process.pid, started=started)
    process.wait()


def left_by(parent: Path, tag: str) -> Path:
    stage = parent / f".state.partial-{tag}-00aa11bb"
    stage.mkdir()
    (stage / "file").write_text("")
    return stage


def elsewhere(process: int) -> Owner:
    """A process of another container that has the name of this machine."""
    return replace(Owner.this_process(), process=process, started=1, place="0123abcd")


def test_a_process_is_known_by_its_number_and_its_beginning(running: Owner, ended: Owner) -> None:
    here = Owner.this_process()
    assert here.is_alive()
    assert running.is_alive()
    assert ended.is_alive() is False
    # The number was given to another process.
    assert running.started is not None
    assert replace(running, started=running.started - 1).is_alive() is False
    assert elsewhere(running.process).is_alive() is None
    assert Owner.parse(running.tag) == running
    # Of earlier releases.
    assert Owner.parse(f"{here.host}-{ended.process}").is_alive() is False
    assert Owner.parse(f"{here.host}-{running.process}").is_alive() is None
    assert Owner.parse("far-away-12") == Owner("far-away", 12)
    for tag in ("far-away", f"{here.host}-{2**31}", f"a-1.{'9' * 30}.0", "a-1.x.0", "a/b-1", "a\\b-1", "a\0-1"):
        with pytest.raises(ValueError, match="the tag"):
            Owner.parse(tag)
    assert Owner("far-away", running.process).is_alive() is None


def test_who_started_this_process_is_above_it(running: Owner) -> None:
    parent = replace(Owner.this_process(), process=os.getppid(), started=atomic._start_of(os.getppid()))
    assert parent.is_above()
    assert not running.is_above()
    assert not replace(parent, place="0123abcd").is_above()


def test_a_process_of_somebody_else_is_not_taken_for_dead(
    running: Owner, ended: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with /proc mounted so that each user sees their own processes."""

    def refuse(process: int, number: int) -> None:
        raise PermissionError

    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").touch()
    place = atomic._place(socket.gethostname())
    monkeypatch.setattr(atomic, "_PROC", tmp_path)
    assert atomic._place(socket.gethostname()) == place  # was noted before
    with monkeypatch.context() as others:
        others.setattr(os, "kill", refuse)
        assert running.is_alive() is None
    (ended_number, _) = os.waitpid(ended.process, 0)
    assert ended_number == ended.process
    assert ended.is_alive() is False


def test_a_system_without_proc_knows_processes_too(
    running: Owner, ended: Owner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_PROC", tmp_path)
    assert replace(running, started=atomic._start_of(running.process)).is_alive()
    assert running.is_alive() is False
    assert ended.is_alive() is False


def test_only_what_nobody_owns_any_more_is_removed(tmp_path: Path, running: Owner, ended: Owner) -> None:
    host = socket.gethostname()
    gone = [
        left_by(tmp_path, ended.tag),
        left_by(tmp_path, f"{host}-{ended.process}"),
        # The number of a process that began after the owner.
        left_by(tmp_path, replace(running, started=1).tag),
    ]
    stay = [left_by(tmp_path, tag) for tag in (running.tag, elsewhere(1).tag, f"{host}-{running.process}", "far-2")]
    (tmp_path / ".partial-of-a-user").mkdir()
    atomic.remove_abandoned(tmp_path, own_folders=True)
    assert [stage.exists() for stage in gone] == [False] * 3
    assert [stage.exists() for stage in stay] == [True] * 4
    assert (tmp_path / ".partial-of-a-user").exists()


def test_dates_in_the_past_or_future_decide_nothing(tmp_path: Path, running: Owner) -> None:
    stages = [left_by(tmp_path, owner.tag) for owner in (running, elsewhere(1))]
    for moment in (0, 2**32):
        for stage in stages:
            os.utime(stage / "file", (moment, moment))
            os.utime(stage, (moment, moment))
        atomic.remove_abandoned(tmp_path, own_folders=True)
        assert [stage.exists() for stage in stages] == [True, True]


def test_what_stands_still_elsewhere_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    still, busy = left_by(tmp_path, elsewhere(1).tag), left_by(tmp_path, "far-away-2")
    monkeypatch.setattr(atomic, "_SECONDS_WITHOUT_CHANGE", 0.0)
    atomic.remove_abandoned(tmp_path)
    assert still.exists()  # one look tells nothing
    (busy / "deeper").mkdir()
    (busy / "deeper" / "file").write_text("more")
    atomic.remove_abandoned(tmp_path)
    assert [still.exists(), busy.exists()] == [False, True]


def test_a_name_with_a_number_that_no_process_has_is_left(tmp_path: Path) -> None:
    left = left_by(tmp_path, f"{Owner.this_process().host}-{'9' * 23}")
    atomic.remove_abandoned(tmp_path, claimed=tmp_path)
    assert left.exists()


def test_in_a_claimed_folder_nobody_else_writes(tmp_path: Path, running: Owner) -> None:
    left = [left_by(tmp_path, owner.tag) for owner in (running, elsewhere(1))]
    atomic.remove_abandoned(tmp_path, claimed=tmp_path / "other")
    assert [stage.exists() for stage in left] == [True, True]
    atomic.remove_abandoned(tmp_path, claimed=tmp_path / "state")
    assert [stage.exists() for stage in left] == [True, False]
    atomic.make_stage(tmp_path / "fresh", tmp_path)


def test_a_stage_that_is_written_stays_when_the_next_is_made(tmp_path: Path) -> None:
    first, second = (atomic.make_stage(tmp_path / name) for name in ("one", "two"))
    assert first.is_dir()
    assert second.is_dir()
    atomic.discard_stage(first)
    assert not first.exists()
    second.mkdir(exist_ok=True)
    atomic.discard_stage(second)
    second.mkdir()  # what could not be removed
    atomic.make_stage(tmp_path / "three")
    assert not second.exists()


def test_own_stages_are_removed(tmp_path: Path) -> None:
    (tmp_path / atomic.partial_name("state")).mkdir()
    atomic.remove_abandoned(tmp_path, own_folders=True)
    assert list(tmp_path.iterdir()) == []


def test_a_removed_folder_is_gone_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "a").write_text("1")
    atomic.remove_folder(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with atomic.atomic_file(target) as partial:
        partial.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    with pytest.raises(ZeroDivisionError), atomic.atomic_file(target) as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert target.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_files_that_this_process_is_writing_stay(tmp_path: Path) -> None:
    with atomic.atomic_file(tmp_path / "one") as first:
        first.write_text("1")
        with atomic.atomic_file(tmp_path / "two") as second:
            second.write_text("2")
            atomic.remove_abandoned(tmp_path, own_folders=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one", "two"]
