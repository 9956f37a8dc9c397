from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import manifest, state
from accelerate.checkpointing.catalog import inspect
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.manifest import Facts
from accelerate.checkpointing.parts import LoadOptions
from accelerate.checkpointing.snapshot import Snapshot, copy_before_step
from accelerate.checkpointing.state import RankGroup, StagedSave
from accelerate.collectives.base import SoloCommunicator
from accelerate.runtime.atomic import make_stage
from accelerate.runtime.current import Topology


def solo(each_node: bool = False) -> RankGroup:
    return RankGroup(SoloCommunicator(), Topology(0, 1, 0, 1, "test"), each_node)


@dataclass
class Rehearsed(SoloCommunicator):
    """A communicator whose other ranks give answers that were written down before."""

    others: list[Any] = field(default_factory=list)

    def gather_object(self, value: object) -> list[Any]:
        return [value, *self.others]


class Writes:
    """A part that is a function."""

    name = "files"
    everywhere = True

    def __init__(self, write: Callable[[FolderWriter], None]) -> None:
        self._write = write

    def snapshot(self) -> None: ...

    def write(self, payload: None, folder: FolderWriter) -> None:
        self._write(folder)

    def read(self, folder: Path, options: LoadOptions) -> None: ...

    def restore(self, payload: None) -> None: ...


def staged(
    target: Path, write: Callable[[FolderWriter], None], group: RankGroup | None = None, step: int = 0
) -> StagedSave:
    folder = FolderWriter(make_stage(target))
    return StagedSave(target, folder, group or solo(), Facts(step=step), None, Snapshot([Writes(write)]))


def test_a_save_appears_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "state"

    def write(folder: FolderWriter) -> None:
        folder.write_json("facts.json", {"a": 1})
        assert not target.exists()

    save = staged(target, write, step=3)
    assert save.folder.path.parent == target.parent
    save.complete()
    info = inspect(target, checksums=True)
    assert (info.is_valid, info.step) == (True, 3)
    assert [entry.name for entry in target.parent.iterdir()] == ["state"]


@pytest.mark.parametrize("interruption", [OSError("disk"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_and_the_old_one_as_it_was(tmp_path: Path, interruption: BaseException) -> None:
    target = tmp_path / "state"
    staged(target, lambda folder: folder.write_json("a", 1), step=1).complete()

    def write(folder: FolderWriter) -> None:
        folder.write_json("a", 2)
        raise interruption

    expected = KeyboardInterrupt if isinstance(interruption, KeyboardInterrupt) else CheckpointError
    with pytest.raises(expected) as caught:
        staged(target, write, step=2).complete()
    assert inspect(target, checksums=True).step == 1
    assert sorted(entry.name for entry in target.iterdir()) == ["a", "manifest.json"]
    if expected is CheckpointError:
        assert caught.value.__cause__ is interruption
        assert "Rank 0: OSError: disk" in str(caught.value)


class Faulty:
    """File operations of which one fails, counted from 0."""

    def __init__(self, at: int) -> None:
        self.left = at

    def wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise OSError("no answer")
            return operation(*arguments)

        return call


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_publish_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    seen = []
    for number in range(50):
        target = tmp_path / str(number)
        if exists:
            staged(target, lambda folder: folder.write_json("a", 1), step=1).complete()
        save, faulty = staged(target, lambda folder: folder.write_json("a", 2), step=2), Faulty(number)

        def publish(*arguments: Any, faulty: Faulty = faulty) -> None:
            with monkeypatch.context() as patched:
                for name in ("fsync", "rename", "replace"):
                    patched.setattr(os, name, faulty.wrap(getattr(os, name)))
                manifest.publish(*arguments)

        monkeypatch.setattr(state, "publish", publish)
        try:
            save.complete()
        except CheckpointError as error:
            seen.append(str(error))
        if faulty.left >= 0:  # there are no more operations
            break
        said = {sentence for sentence in ("is in place", "next save or load", "untouched") if sentence in seen[-1]}
        found = manifest.Manifest.read(target)
        if found is not None and found.facts.step == 2:
            assert said == {"is in place"}
        elif manifest.is_pending(target):
            assert said == {"next save or load"}
            manifest.finish_publish(target)
        else:
            assert said == {"untouched"}
            assert exists or not target.exists()
        assert not target.exists() or inspect(target, checksums=True).step == (1 if said == {"untouched"} else 2)
    assert all("Rank 0: OSError: no answer" in text for text in seen)
    assert any("is in place" in text for text in seen)
    assert any("next save or load" in text for text in seen) == exists


def test_a_failure_elsewhere_is_the_same_error_here(tmp_path: Path) -> None:
    group = RankGroup(Rehearsed([(0, None, (CheckpointError, "OSError: full"))]), Topology(0, 2, 0, 2, "test"))
    save = staged(tmp_path / "state", lambda folder: folder.write_json("a", 1), group)
    with pytest.raises(CheckpointError, match="Rank 1: OSError: full"):
        save.complete()
    assert list(tmp_path.iterdir()) == []


def test_machines_without_a_common_disk_are_told(tmp_path: Path) -> None:
    save = StagedSave(tmp_path / "state", FolderWriter(tmp_path / "not here"), solo(), Facts(), None)
    with pytest.raises(CheckpointError, match="save_on_each_node"):
        save.complete()


def test_each_machine_has_its_leader_and_its_files() -> None:
    topology = Topology(5, 8, 1, 4, "test")
    shared, own = (RankGroup(SoloCommunicator(), topology, each_node) for each_node in (False, True))
    assert (shared.leads, shared.leader) == (False, 0)
    assert (own.leads, own.leader) == (False, 4)
    assert RankGroup(SoloCommunicator(), Topology(4, 8, 0, 4, "test"), True).leads
    group = RankGroup(Rehearsed([(0, "other machine", None), (4, "this machine", None)]), topology, True)
    assert group.agree("here", Path("target"), "done") == ["here", "this machine"]


def test_a_program_that_ends_waits_for_its_last_checkpoint(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import sys, torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(torch.nn.Linear(1500, 1500))
        accelerator.save_state(sys.argv[1], blocking=False)
        """
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "state")], check=True, timeout=600)
    assert inspect(tmp_path / "state", checksums=True).is_valid


def test_an_interruption_while_hooks_run_leaves_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    accelerator.register_save_state_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state(str(tmp_path / "state"))
    accelerator.end_training()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_emptied_while_it_is_written_is_not_published(tmp_path: Path) -> None:
    """The last good checkpoint would be removed after that."""
    target = tmp_path / "checkpoint_1"
    staged(tmp_path / "checkpoint_0", lambda folder: folder.write_json("a", 0)).complete()

    def write(folder: FolderWriter) -> None:
        folder.write_json("a", 1)
        folder.finish()
        shutil.rmtree(folder.path)
        folder.write_json("b", 1)

    save = staged(target, write)
    save.keep = 1
    with pytest.raises(
        CheckpointError, match=r"is not there any more: a: it is missing.* Earlier checkpoints are untouched"
    ):
        save.complete()
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint_0"]


def test_a_checkpoint_that_cannot_take_its_name_is_told(tmp_path: Path) -> None:
    target = tmp_path / "state"

    def write(folder: FolderWriter) -> None:
        folder.write_json("a", 1)
        target.write_text("somebody else's")

    with pytest.raises(CheckpointError, match=r"Rank 0: .* untouched"):
        staged(target, write).complete()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert target.read_text() == "somebody else's"


def test_older_checkpoints_that_cannot_be_removed_are_left_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / f"checkpoint_{'0' * 240}"  # so long that there is no room for the name of what is being removed
    broken.mkdir()
    save = staged(tmp_path / "checkpoint_1", lambda folder: folder.write_json("a", 1), step=1)
    save.keep = 1
    save.complete()
    assert inspect(tmp_path / "checkpoint_1", checksums=True).is_valid
    assert broken.is_dir()
    assert f"Older checkpoints in {tmp_path} were not removed: " in caplog.text


def test_a_state_that_cannot_be_copied_stops_the_save(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    def fail(state: Any) -> Any:
        raise MemoryError("no more")

    class Deferred(Writes):
        def snapshot(self) -> Any:
            return copy_before_step(optimizer, optimizer.state_dict(), "optimizer 0", fail)

    folder = FolderWriter(make_stage(tmp_path / "state"))
    part = Deferred(lambda folder: folder.write_json("a", 1))
    save = StagedSave(tmp_path / "state", folder, solo(), Facts(), None, Snapshot([part]))
    with pytest.raises(CheckpointError, match=r"could not be saved.*Rank 0: MemoryError: no more"):
        save.complete()
    assert list(tmp_path.iterdir()) == []
