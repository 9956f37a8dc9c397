"""`accelerate checkpoints`: what it shows, verifies and removes, on checkpoints that `save_state` wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pexpect
import pytest
import torch
from tests.support.launching import launch_environment

from accelerate import Accelerator
from accelerate.checkpointing.catalog import catalog
from accelerate.commands import accelerate_cli
from accelerate.utils import ProjectConfiguration

NUMBER = 4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with some checkpoints, one after each update."""
    project = tmp_path_factory.mktemp("project")
    settings = ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=settings)
    model = torch.nn.Linear(20, 20)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(NUMBER):
        accelerator.backward(model(torch.ones(2, 20)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
    accelerator.reset()
    return project


@pytest.fixture
def project(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "project"))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    try:
        code = accelerate_cli.run(["checkpoints", *map(str, words)])
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    code, out, _ = run(capsys, *words, "--json")
    assert code in (0, 1)
    found: dict[str, Any] = json.loads(out)
    return found


def kept(project: Path) -> list[str]:
    return sorted(folder.name for folder in (project / "checkpoints").iterdir())


def numbered(*numbers: int) -> list[str]:
    return [f"checkpoint_{number}" for number in numbers]


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_the_table(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, project)
    rows = [line.split() for line in out.splitlines() if line.strip().startswith("checkpoint_")]
    assert code == 0
    assert [row[0] for row in rows] == numbered(0, 1, 2, 3)
    assert [row[1] for row in rows] == ["1", "2", "3", "4"]
    assert all(row[-2:] == ["1", "valid"] for row in rows)
    assert out.splitlines()[1].split() == ["name", "step", "epoch", "samples", "age", "size", "processes", "state"]
    assert "newest valid: checkpoint_3." in out


def test_json_has_every_value(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, project)
    assert (found["folder"], found["verified"]) == (str(project), False)
    for entry, info in zip(found["checkpoints"], catalog(project), strict=True):
        assert entry["path"] == str(info.path)
        for name in ("name", "step", "epoch", "samples", "created", "size", "world_size", "is_valid", "problem"):
            assert entry[name] == getattr(info, name)
        assert entry["size"] == sum(file.stat().st_size for file in info.path.iterdir() if file.name != "manifest.json")


@pytest.mark.parametrize("below", [".", "checkpoints", "checkpoints/checkpoint_2"])
def test_which_folders_can_be_named(project: Path, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [entry["name"] for entry in as_json(capsys, project / below)["checkpoints"]]
    assert names == (numbered(2) if below.endswith("2") else numbered(0, 1, 2, 3))


def test_a_folder_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, tmp_path)
    assert (code, out) == (0, f"There are no checkpoints in {str(tmp_path)!r}.\n")
    assert as_json(capsys, tmp_path)["checkpoints"] == []
    code, _, err = run(capsys, tmp_path / "nowhere")
    assert code == 2
    assert "is not a folder" in err


def test_a_broken_checkpoint_is_shown_with_its_problem(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "checkpoints" / "checkpoint_3" / "optimizer.bin").unlink()
    code, out, _ = run(capsys, project)
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.strip().startswith("checkpoint_3")]
    assert "broken: optimizer.bin: it is missing" in row
    assert "newest valid: checkpoint_2." in out


def test_verify_finds_a_flipped_byte(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, project, "--verify")[0] == 0
    flip_a_byte(project / "checkpoints" / "checkpoint_1" / "model.safetensors")
    assert all(entry["is_valid"] for entry in as_json(capsys, project)["checkpoints"])  # sizes do not tell
    code, out, _ = run(capsys, project, "--verify")
    assert code == 1
    assert "broken: model.safetensors: its bytes have changed" in out
    assert out.count("valid, checksums compared") == NUMBER - 1
    found = as_json(capsys, project, "--verify")
    assert found["verified"]
    assert [entry["is_valid"] for entry in found["checkpoints"]] == [True, False, True, True]


def test_a_manifest_that_cannot_be_read(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "checkpoints" / "checkpoint_1" / "manifest.json").write_text("{")
    for options in ((), ("--verify",)):
        entries = as_json(capsys, project, *options)["checkpoints"]
        assert [entry["is_valid"] for entry in entries] == [True, False, True, True]
        assert "manifest.json" in entries[1]["problem"]


def test_a_checkpoint_of_another_library(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "checkpoints" / "checkpoint_0" / "manifest.json").unlink()
    code, out, _ = run(capsys, project, "--verify")
    assert code == 0
    (row,) = [line for line in out.splitlines() if line.strip().startswith("checkpoint_0")]
    assert row.split()[1:4] == ["-", "-", "-"]
    assert "valid (no manifest)" in row


# --- prune ------------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, project, "--prune", "--keep", 2, "--yes")
    assert code == 0
    assert out.count("(to be removed)") == 2
    assert "Removed 2 checkpoints" in out
    assert kept(project) == numbered(2, 3)
    assert "There is nothing to remove." in run(capsys, project, "--prune", "--keep", 2, "--yes")[1]
    found = as_json(capsys, project, "--prune", "--keep", 1, "--yes")
    assert [entry["name"] for entry in found["removed"]] == numbered(2)
    assert [entry["name"] for entry in found["checkpoints"]] == numbered(3)


def test_prune_counts_valid_ones_only(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (2, 3):
        (project / "checkpoints" / f"checkpoint_{number}" / "model.safetensors").unlink()
    assert run(capsys, project, "--prune", "--keep", 1, "--yes")[0] == 0
    assert kept(project) == numbered(1)


def test_prune_after_verify_does_not_keep_a_corrupt_one_for_a_good_one(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(project / "checkpoints" / "checkpoint_3" / "model.safetensors")
    assert run(capsys, project, "--verify", "--prune", "--keep", 1, "--yes")[0] == 1
    assert kept(project) == numbered(2)


def test_prune_removes_nothing_where_nothing_is_valid(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(NUMBER):
        (project / "checkpoints" / f"checkpoint_{number}" / "model.safetensors").unlink()
    code, out, _ = run(capsys, project, "--prune", "--keep", 1, "--yes")
    assert code == 0
    assert "none is valid" in out
    assert kept(project) == numbered(0, 1, 2, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--prune",), "without --keep"),
        (("--keep", "2"), "--keep 2 was given without --prune"),
        (("--yes",), "--yes was given without --prune"),
        (("--prune", "--keep", "0", "--yes"), "keep=0"),
        (("--prune", "--keep", "2", "--json"), "Add --yes"),
        (("--prune", "--keep", "2"), "nobody to ask"),
    ],
)
def test_options_that_do_not_go_together(
    project: Path, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, project, *words)
    assert (code, out) == (2, "")
    assert told in err
    assert kept(project) == numbered(0, 1, 2, 3)


@pytest.mark.parametrize(("answer", "left"), [("y", (3,)), ("n", (0, 1, 2, 3)), ("", (0, 1, 2, 3))])
def test_prune_asks(project: Path, answer: str, left: tuple[int, ...]) -> None:
    words = ["-m", "accelerate.commands.accelerate_cli", "checkpoints", str(project), "--prune", "--keep", "1"]
    child = pexpect.spawn(sys.executable, words, env=launch_environment(), timeout=600, encoding="utf-8")  # type: ignore[arg-type]
    child.expect(r"Remove 3 checkpoints \(")
    child.sendline(answer)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert kept(project) == numbered(*left)


def test_torch_is_not_loaded(project: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    env = launch_environment({"PYTHONPATH": f"{tmp_path}:{launch_environment()['PYTHONPATH']}"})
    (project / "checkpoints" / "checkpoint_0" / "manifest.json").unlink()  # its files are opened then
    for words in ((), ("--verify",), ("--json", "--prune", "--keep", "1", "--yes")):
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "checkpoints", str(project), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
    assert kept(project) == numbered(3)
