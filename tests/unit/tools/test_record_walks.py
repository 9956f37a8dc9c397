"""The recorder counts what a request enters, and nothing that an import runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tools import record_walks
from tools.record_walks import GUIDES, Recorder, Walk

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not name the class of a method")

FILES = {
    "door": "from walked import room\n\n\ndef enter(value):\n    return room.Room(value).double()\n",
    "room": """
class Room:
    def __init__(self, value):
        self.value = value

    def double(self):
        return [self._twice(value) for value in [self.value] * 3]

    def _twice(self, value):
        from walked.deep.cellar import twice
        return twice(value)
""",
    "deep/__init__": "",
    "deep/cellar": "def made():\n    return 2\n\n\nTWO = made()\n\n\ndef twice(value):\n    return value * TWO\n",
    "threads": """
import threading


def start():
    from walked.deep.cellar import twice
    thread = threading.Thread(target=twice, args=(1,))
    thread.start()
    thread.join()
""",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    folder = tmp_path / "walked"
    for name, text in {"__init__": "", **FILES}.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name: importlib.import_module(f"walked.{name}")
    for name in [name for name in sys.modules if name.partition(".")[0] == "walked"]:
        del sys.modules[name]


def record(package: Path, request: Callable[[], object]) -> Walk:
    recorder = Recorder(package)
    before = sys.getprofile()
    try:
        with recorder.recording() as walk:
            request()
    finally:
        sys.setprofile(before)
    return walk


def test_files_are_listed_by_their_first_function_in_order(
    package: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    door = package("door")
    walk = record(tmp_path / "walked", lambda: door.enter(4))
    assert list(walk.entries.items()) == [
        ("door.py", "enter"),
        ("room.py", "Room.__init__"),
        ("deep/cellar.py", "twice"),
    ]
    # From outside to the door, to the constructor, to the method, and to the cellar: three equal calls count once.
    assert (walk.num_files, walk.hops, walk.helpers) == (3, 4, {})


def test_what_an_import_runs_does_not_count(package: Callable[[str], ModuleType], tmp_path: Path) -> None:
    walk = record(tmp_path / "walked", lambda: package("deep.cellar"))
    assert (walk.entries, walk.hops) == ({}, 0)


def test_files_of_other_threads_are_listed_apart(package: Callable[[str], ModuleType], tmp_path: Path) -> None:
    threads = package("threads")
    walk = record(tmp_path / "walked", threads.start)
    assert (walk.entries, walk.helpers) == ({"threads.py": "start"}, {"deep/cellar.py": "twice"})
    assert walk.num_files == 2


def test_nothing_is_recorded_after_the_end(package: Callable[[str], ModuleType], tmp_path: Path) -> None:
    door = package("door")
    recorder = Recorder(tmp_path / "walked")
    with recorder.recording() as walk:
        recorder.stop()
        door.enter(1)
    assert (walk.num_files, walk.hops) == (0, 0)


def walks_of(length: int) -> dict[str, Walk]:
    return {name: Walk({f"{number}.py": "run" for number in range(length)}, {}, 1) for name in GUIDES}


def test_a_walk_that_is_too_long_is_named() -> None:
    assert record_walks.too_long(walks_of(1)) == []
    problems = record_walks.too_long(walks_of(100))
    assert len(problems) == len(GUIDES)
    assert "passes through 100 files" in problems[0]


def test_the_page_shows_files_functions_and_guides() -> None:
    text = record_walks.render(walks_of(2))
    assert "1. `0.py`: `run`\n2. `1.py`: `run`\n" in text
    assert f"| Save | `save_state(folder)` | 2 | {GUIDES['save'].wanted} | 1 |" in text


def test_guides_are_not_above_what_is_allowed() -> None:
    assert [name for name, guide in GUIDES.items() if guide.allowed < guide.wanted] == []
