"""Files and folders that appear as a whole, and what killed writers leave."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerate.runtime import atomic


def left_by(parent: Path, host: str, process: int, age: float = 0.0) -> Path:
    stage = parent / f".state.partial-{host}-{process}-00aa11bb"
    stage.mkdir()
    (stage / "file").write_text("")
    for path in (stage, stage / "file"):
        os.utime(path, (time.time() - age,) * 2)
    return stage


def test_only_what_nobody_owns_any_more_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        time.sleep(0.05)  # a folder is younger than its owner, in the clock of the system
        host = socket.gethostname()
        gone = [
            left_by(tmp_path, host, ended.pid),
            left_by(tmp_path, "far-away", 1, age=7200),
            # The number of a process that began long after the folder was last touched.
            left_by(tmp_path, host, os.getppid(), age=10 * 365 * 86400),
        ]
        stay = [left_by(tmp_path, host, running.pid), left_by(tmp_path, "far-away", 2)]
        (tmp_path / ".partial-of-a-user").mkdir()
        atomic.remove_abandoned(tmp_path, own_folders=True)
        assert [stage.exists() for stage in gone] == [False] * 3
        assert [stage.exists() for stage in stay] == [True] * 2
        assert (tmp_path / ".partial-of-a-user").exists()
    finally:
        running.communicate(b"\n")


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
