"""Temporary files: nobody else can guess their names, read them, or be there first."""

from __future__ import annotations

import ast
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

import accelerate
from accelerate.checkpointing.export import save_weights, weights_of
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.weight_folder import open_folder
from accelerate.launch.agent import _with_place_and_name
from accelerate.launch.plan import ElasticOptions
from accelerate.launch.processes import launch_folder
from accelerate.runtime import atomic

PACKAGE = Path(accelerate.__file__).parent
PRIVATE_BY_DESIGN = {"TemporaryDirectory", "mkdtemp", "NamedTemporaryFile", "mkstemp", "TemporaryFile"}
READ_ONLY = {"gettempdir"}  # to find the folders that killed launchers left


@pytest.fixture
def shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that everybody may write to, and a program that hides nothing by itself."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = os.umask(0)
    yield folder
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def nodes(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the syntax of the files of the package in which one of the words stands."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            yield from ((path.relative_to(PACKAGE).as_posix(), node) for node in ast.walk(ast.parse(text)))


def test_temporary_files_are_made_by_functions_that_keep_them_private() -> None:
    used = {
        (path, node.attr)
        for path, node in nodes("tempfile")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tempfile"
    }
    assert {name for _, name in used} <= PRIVATE_BY_DESIGN | READ_ONLY
    assert len(used) > 5


def test_no_path_in_a_folder_of_all_users_is_written_down() -> None:
    shared = ("/tmp", "/var/tmp", "/dev/shm")
    found = [
        (path, node.value)
        for path, node in nodes(*shared)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(shared)
    ]
    assert found == []


def test_files_of_a_launch_are_private(shared_folder: Path) -> None:
    with launch_folder({"hostfile": "one slots=2\n"}) as folder:
        assert Path(folder).parent == shared_folder
        assert mode(Path(folder)) == 0o700
        assert (Path(folder) / "hostfile").is_file()
    assert list(shared_folder.iterdir()) == []


def test_logs_that_nobody_named_a_folder_for_are_private(
    shared_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [_with_place_and_name(ElasticOptions(1, redirects="3")).log_dir for _ in range(2)]
    assert made[0] != made[1]
    assert [mode(Path(str(folder))) for folder in made] == [0o700, 0o700]
    assert str(made[0]) in capsys.readouterr().err


def test_weights_on_their_way_to_an_address_are_private(shared_folder: Path) -> None:
    pytest.importorskip("fsspec")
    modes: list[int] = []
    folder = open_folder("memory://hostile/weights")
    with folder.stage() as stage:
        assert stage.parent == shared_folder
        modes.append(mode(stage))
    assert modes == [0o700]


def test_names_that_are_being_written_cannot_be_guessed(tmp_path: Path) -> None:
    names = {atomic.partial_name("w") for _ in range(100)}
    assert len(names) == 100
    with atomic.atomic_file(tmp_path / "w") as first, atomic.atomic_file(tmp_path / "w") as second:
        assert first != second
        first.touch()
        second.touch()


def test_files_in_folders_of_the_user_follow_the_users_mask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        model = torch.nn.Linear(2, 2)
        save_weights(weights_of(model, model.state_dict()), open_folder(tmp_path / "weights"))
        with closing(FolderWriter(tmp_path)) as folder:
            folder.write_json("a.json", {})
            folder.finish()
        with atomic.atomic_file(tmp_path / "b") as partial:
            partial.touch()
    finally:
        os.umask(before)
    assert {mode(path) for path in (tmp_path / "weights").iterdir()} == {0o640}
    assert mode(tmp_path / "weights") == 0o750
    assert {mode(tmp_path / name) for name in ("a.json", "b")} == {0o640}
