from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from accelerate.checkpointing import names, sealed
from accelerate.checkpointing.catalog import catalog, inspect, newest_valid, prune
from accelerate.checkpointing.folder import record_of
from accelerate.checkpointing.manifest import Facts, FileRecord, Manifest, Problem, verify
from accelerate.checkpointing.transaction import publish
from accelerate.runtime import atomic


def write(target: Path, content: dict[str, str], step: int = 0, created: float | None = None) -> Path:
    """Publish a checkpoint of plain text files."""
    inside = target.is_dir()
    stage = (target if inside else target.parent) / atomic.partial_name(target.name)
    stage.mkdir(parents=True)
    for name, text in content.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text(text)
    records = tuple(record_of(stage / name, stage) for name in content)
    manifest = Manifest(records, 2, Facts(step=step, samples=10 * step, epoch=1), created or time.time())
    publish(stage, target, manifest)
    return target


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
        assert verify(folder) == []
        (folder / "a").unlink()
        (folder / "b").write_text("tw")
        (folder / "c").write_text("thref")
        sizes = [Problem("a", "it is missing"), Problem("b", "it has 2 bytes instead of 3")]
        assert verify(folder, checksums=False) == sizes
        changed = Problem("c", "its bytes have changed since it was written (checksum)")
        assert verify(folder) == [*sizes, changed]

    def test_a_damaged_manifest_is_an_error(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "state", {"a": "one"})
        (folder / "manifest.json").write_text("{")
        with pytest.raises(RuntimeError, match=r"manifest\.json' cannot be read"):
            verify(folder)
        assert not inspect(folder).is_valid


class TestCatalog:
    def test_numbers_order_checkpoints_and_times_those_with_names(self, tmp_path: Path) -> None:
        for number in (10, 9, 2):
            write(names.numbered(tmp_path / "checkpoints", number), {"a": "1"}, step=number)
        assert [info.step for info in catalog(tmp_path)] == [2, 9, 10]
        for created, name in ((30.0, "first"), (20.0, "second")):
            write(tmp_path / "other" / name, {"a": "1"}, created=created)
        assert [info.name for info in catalog(tmp_path / "other")] == ["second", "first"]
        assert catalog(tmp_path / "nowhere") == []

    def test_what_is_no_checkpoint_is_not_listed(self, tmp_path: Path) -> None:
        write(tmp_path / "state", {"a": "1"})
        (tmp_path / "logs").mkdir()
        (tmp_path / "file").write_text("")
        (tmp_path / atomic.partial_name("state")).mkdir()
        (info,) = catalog(tmp_path)
        assert (info.name, info.world_size, info.epoch, info.samples, info.size) == ("state", 2, 1, 0, 1)

    def test_the_newest_valid_one_is_found_and_the_reason_names_the_others(self, tmp_path: Path) -> None:
        folders = [write(names.numbered(tmp_path, number), {"a": "1"}) for number in range(4)]
        (folders[3] / "a").unlink()
        choice = newest_valid(tmp_path, without={folders[2]})
        assert choice.value is not None
        assert choice.value.path == folders[1]
        assert "checkpoint_3 was passed over (a: it is missing)" in choice.reason
        assert "checkpoint_2 was passed over (it is broken)" in choice.reason
        nothing = newest_valid(tmp_path / "nowhere")
        assert nothing.value is None
        assert "there is no valid checkpoint" in nothing.reason

    def test_a_checkpoint_without_a_manifest_must_open(self, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint_0"
        folder.mkdir()
        assert inspect(folder).problem == "it holds no file of a checkpoint"
        torch.save({"a": torch.ones(3)}, folder / "optimizer.bin")
        info = inspect(folder)
        assert (info.is_valid, info.problem, info.world_size) == (True, "no manifest", 0)
        content = (folder / "optimizer.bin").read_bytes()
        (folder / "optimizer.bin").write_bytes(content[: len(content) // 2])
        assert inspect(folder).problem == "optimizer.bin: it is not a whole torch file"
        (folder / "optimizer.bin").unlink()
        (folder / "model.safetensors").write_bytes(b"nothing")
        assert "model.safetensors: it cannot be opened" in str(inspect(folder).problem)


class TestPruning:
    def test_the_newest_valid_ones_stay(self, tmp_path: Path) -> None:
        folders = [write(names.numbered(tmp_path, number), {"a": "1"}) for number in range(4)]
        (folders[2] / "a").unlink()
        assert set(prune(tmp_path, 2)) == {folders[0], folders[2]}
        assert [info.name for info in catalog(tmp_path)] == ["checkpoint_1", "checkpoint_3"]
        with pytest.raises(ValueError, match="keep=0"):
            prune(tmp_path, 0)

    def test_a_spared_one_counts_and_named_ones_are_left_alone(self, tmp_path: Path) -> None:
        folders = [write(names.numbered(tmp_path, number), {"a": "1"}) for number in (1, 5)]
        write(tmp_path / "best", {"a": "1"})
        assert prune(tmp_path, 1, spare=folders[0]) == [folders[1]]
        assert {info.name for info in catalog(tmp_path)} == {"checkpoint_1", "best"}


class TestSealing:
    """A checkpoint that replaces another in its folder, stopped at every step."""

    def half_done(self, folder: Path, moved: int, manifest: bool) -> None:
        """Bring a folder into the state in which a killed save leaves it."""
        write(folder, {"a": "old", "b": "old", "stale": "old"})
        (folder / "notes").write_text("mine")
        source = folder / ".sealed"
        source.mkdir()
        for name in ("a", "b", "c"):
            (source / name).write_text("new")
        records = tuple(record_of(source / name, source) for name in ("a", "b", "c"))
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
        assert not sealed.is_pending(tmp_path / "state")

    def test_old_files_of_another_library_go_and_others_stay(self, tmp_path: Path) -> None:
        folder = tmp_path / "state"
        folder.mkdir()
        for name in ("random_states_5.pkl", "optimizer_1.bin", "scaler.pt", "config.json", "model.py"):
            (folder / name).write_text("")
        write(folder, {"model.safetensors": "new"})
        found = {file.name for file in folder.iterdir()}
        assert found == {"model.safetensors", "manifest.json", "config.json", "model.py"}


class TestStaging:
    def left_by(self, parent: Path, host: str, process: int, age: float = 0.0) -> Path:
        stage = parent / f".state.partial-{host}-{process}-00aa11bb"
        stage.mkdir()
        (stage / "file").write_text("")
        for path in (stage, stage / "file"):
            os.utime(path, (time.time() - age,) * 2)
        return stage

    def test_only_what_nobody_owns_any_more_is_removed(self, tmp_path: Path) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            time.sleep(0.05)  # a folder is younger than its owner, in the clock of the system
            host = socket.gethostname()
            gone = [
                self.left_by(tmp_path, host, ended.pid),
                self.left_by(tmp_path, "far-away", 1, age=7200),
                # The number of a process that began long after the folder was last touched.
                self.left_by(tmp_path, host, os.getppid(), age=10 * 365 * 86400),
            ]
            stay = [self.left_by(tmp_path, host, running.pid), self.left_by(tmp_path, "far-away", 2)]
            (tmp_path / ".partial-of-a-user").mkdir()
            atomic.remove_abandoned(tmp_path, own_folders=True)
            assert [stage.exists() for stage in gone] == [False] * 3
            assert [stage.exists() for stage in stay] == [True] * 2
            assert (tmp_path / ".partial-of-a-user").exists()
        finally:
            running.communicate(b"\n")

    def test_own_stages_are_removed(self, tmp_path: Path) -> None:
        (tmp_path / atomic.partial_name("state")).mkdir()
        atomic.remove_abandoned(tmp_path, own_folders=True)
        assert list(tmp_path.iterdir()) == []

    def test_a_removed_checkpoint_is_gone_at_once(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "state", {"a": "1"})
        atomic.remove_folder(folder)
        assert list(tmp_path.iterdir()) == []


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
    assert names.is_own_file(name) is is_ours


def test_a_record_compares_by_value() -> None:
    assert FileRecord("a", 1, "crc32:0") == FileRecord("a", 1, "crc32:0")


def test_a_manifest_of_a_later_release_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "state", {"a": "one"})
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, "version": 99}))
    with pytest.raises(RuntimeError, match="it has version 99, and this release reads up to 1"):
        Manifest.read(folder)
