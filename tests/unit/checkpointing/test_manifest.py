from __future__ import annotations

import json
import math
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import write_checkpoint as write

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.catalog import catalog, inspect
from accelerate.checkpointing.files import FileProblem, FileRecord
from accelerate.checkpointing.manifest import Manifest, is_own_file, is_pending, moment_in


def problems(folder: Path, *, checksums: bool = True) -> list[FileProblem]:
    manifest = Manifest.read(folder)
    assert manifest is not None
    return manifest.problems(folder, checksums=checksums)


class TestManifest:
    def test_it_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        write(tmp_path / "state", {"a": "1", "sub/b": "22"}, step=4)
        found = Manifest.read(tmp_path / "state")
        assert found is not None
        assert (found.world_size, found.facts.step, found.size) == (2, 4, 3)
        assert [record.name for record in found.files] == ["a", "sub/b"]
        assert found.versions["torch"] == torch.__version__.split("+")[0] or found.versions["torch"]
        assert Manifest.read(tmp_path) is None
        assert json.loads((tmp_path / "state" / "manifest.json").read_text())["version"] == 1

    def test_every_kind_of_damage_is_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "state", {"a": "one", "b": "two", "c": "three", "d": "four"})
        assert problems(folder) == []
        (folder / "a").unlink()
        (folder / "b").write_text("tw")
        (folder / "c").write_text("thref")
        sizes = [FileProblem("a", "it is missing"), FileProblem("b", "it has 2 bytes instead of 3")]
        assert problems(folder, checksums=False) == sizes
        changed = FileProblem("c", "its bytes have changed since it was written (checksum)")
        assert problems(folder) == [*sizes, changed]

    def test_a_file_that_cannot_be_reached_is_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "state", {"sub/b": "22"})
        (folder / "sub" / "b").unlink()
        (folder / "sub").rmdir()
        (folder / "sub").write_text("a file")
        assert problems(folder) == [FileProblem("sub/b", "it cannot be read (Not a directory)")]

    def test_a_package_that_is_not_installed_has_no_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def missing(package: str) -> str:
            raise PackageNotFoundError(package)

        monkeypatch.setattr("accelerate.checkpointing.manifest.version", missing)
        found = Manifest.read(write(tmp_path / "state", {"a": "1"}))
        assert found is not None
        assert found.versions["torch"] == "unknown"

    def test_a_damaged_manifest_is_an_error(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "state", {"a": "one"})
        (folder / "manifest.json").write_text("{")
        with pytest.raises(RuntimeError, match=r"manifest\.json' cannot be read"):
            problems(folder)
        assert not inspect(folder).is_valid


class TestReplacing:
    """A checkpoint that replaces another in its folder, stopped at every step."""

    def half_done(self, folder: Path, moved: int, manifest: bool) -> None:
        """Bring a folder into the state in which a killed save leaves it."""
        write(folder, {"a": "old", "b": "old", "stale": "old"})
        (folder / "notes").write_text("mine")
        source = folder / ".sealed"
        source.mkdir()
        for name in ("a", "b", "c"):
            (source / name).write_text("new")
        records = tuple(FileRecord.of(source / name, source) for name in ("a", "b", "c"))
        (source / "manifest.json").write_text(json.dumps(Manifest(records).to_json()))
        if moved:
            (folder / "stale").unlink()
        for name in ("a", "b", "c")[:moved]:
            (source / name).replace(folder / name)
        if manifest:
            (source / "manifest.json").replace(folder / "manifest.json")

    @pytest.mark.parametrize(("moved", "manifest"), [(0, False), (1, False), (2, False), (3, False), (3, True)])
    def test_whoever_comes_next_finishes(self, tmp_path: Path, moved: int, manifest: bool) -> None:
        folder = tmp_path / "state"
        self.half_done(folder, moved, manifest)
        assert inspect(folder, checksums=True).is_valid
        found = {file.name: file.read_text() for file in folder.iterdir() if file.name != "manifest.json"}
        assert found == {"a": "new", "b": "new", "c": "new", "notes": "mine"}

    def test_a_decided_one_is_in_the_catalog(self, tmp_path: Path) -> None:
        self.half_done(tmp_path / "state", 2, False)
        (tmp_path / "state" / "manifest.json").unlink()
        assert [info.is_valid for info in catalog(tmp_path)] == [True]
        assert not is_pending(tmp_path / "state")

    def test_old_files_of_another_library_go_and_others_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "state"
        folder.mkdir()
        for name in ("random_states_5.pkl", "optimizer_1.bin", "scaler.pt", "config.json", "model.py"):
            (folder / name).write_text("")
        write(folder, {"model.safetensors": "new"})
        found = {file.name for file in folder.iterdir()}
        assert found == {"model.safetensors", "manifest.json", "config.json", "model.py"}


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("model.safetensors", True),
        ("model_3.safetensors", True),
        ("pytorch_model.bin", True),
        ("random_states_12.pkl", True),
        ("custom_checkpoint_0.pkl", True),
        ("dl_state_dict_1_rank2.bin", True),
        ("scaler.pt", True),
        ("manifest.json", True),
        ("config.json", False),
        ("model-00001-of-00002.safetensors", False),
        ("optimizer.bin.bak", False),
    ],
)
def test_own_files_are_known_by_name(name: str, is_ours: bool) -> None:
    assert is_own_file(name) is is_ours


def test_a_record_compares_by_value() -> None:
    assert FileRecord("a", 1, "crc32:0") == FileRecord("a", 1, "crc32:0")


def test_a_manifest_of_a_later_release_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "state", {"a": "one"})
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, "version": 99}))
    with pytest.raises(RuntimeError, match="it has version 99, and this release reads up to 1"):
        Manifest.read(folder)


def test_a_checkpoint_is_younger_than_those_beside_it_whatever_the_clock_says(tmp_path: Path) -> None:
    before = time.time()
    assert moment_in(tmp_path / "nowhere") >= before
    for name, created in {"past": 1.0, "future": before + 1e6, "text": "1", "endless": math.inf}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(
            json.dumps(Manifest((), versions={}, created=created).to_json())  # type: ignore[arg-type]
        )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    (tmp_path / "file").touch()
    assert before + 1e6 < moment_in(tmp_path) < before + 1e6 + 1


def test_a_manifest_whose_facts_have_changed_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "state", {"a": "1"}, step=4)
    file = tmp_path / "state" / "manifest.json"
    found = json.loads(file.read_text())
    file.write_text(json.dumps({**found, "world_size": 3}))
    with pytest.raises(CheckpointError, match=r"manifest\.json.*its bytes have changed since it was written"):
        Manifest.read(tmp_path / "state")
    del found["checksum"]  # as earlier releases wrote it
    file.write_text(json.dumps({**found, "world_size": 3}))
    manifest = Manifest.read(tmp_path / "state")
    assert manifest is not None
    assert manifest.world_size == 3
