from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.background import PendingSave
from accelerate.checkpointing.catalog import inspect
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.manifest import Facts
from accelerate.checkpointing.team import Failure, Team
from accelerate.checkpointing.transaction import Transaction
from accelerate.collectives import SoloCommunicator
from accelerate.runtime.topology import Topology


def solo(each_node: bool = False) -> Team:
    return Team(SoloCommunicator(), Topology(0, 1, 0, 1, "test"), each_node)


@dataclass
class Rehearsed(SoloCommunicator):
    """A communicator whose other ranks give answers that were written down before."""

    others: list[Any] = field(default_factory=list)

    def gather_object(self, value: object) -> list[Any]:
        return [value, *self.others]


def test_a_save_appears_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "state"
    transaction = Transaction.begin(target, solo())
    assert transaction.stage.parent == target.parent

    def write(folder: StagedFolder) -> None:
        folder.write_json("facts.json", {"a": 1})
        assert not target.exists()

    transaction.complete(write, solo(), Facts(step=3))
    info = inspect(target, checksums=True)
    assert (info.is_valid, info.step) == (True, 3)
    assert [entry.name for entry in target.parent.iterdir()] == ["state"]


@pytest.mark.parametrize("interruption", [OSError("disk"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing_and_the_old_one_as_it_was(tmp_path: Path, interruption: BaseException) -> None:
    target = tmp_path / "state"
    Transaction.begin(target, solo()).complete(lambda folder: folder.write_json("a", 1), solo(), Facts(step=1))

    def write(folder: StagedFolder) -> None:
        folder.write_json("a", 2)
        raise interruption

    expected = KeyboardInterrupt if isinstance(interruption, KeyboardInterrupt) else CheckpointError
    with pytest.raises(expected) as caught:
        Transaction.begin(target, solo()).complete(write, solo(), Facts(step=2))
    assert inspect(target, checksums=True).step == 1
    assert sorted(entry.name for entry in target.iterdir()) == ["a", "manifest.json"]
    if expected is CheckpointError:
        assert caught.value.__cause__ is interruption
        assert "Rank 0: OSError: disk" in str(caught.value)


def test_a_failure_elsewhere_is_the_same_error_here(tmp_path: Path) -> None:
    target = tmp_path / "state"
    transaction = Transaction.begin(target, solo())
    team = Team(Rehearsed([(0, Failure(1, "OSError: full"))]), Topology(0, 2, 0, 2, "test"))
    with pytest.raises(CheckpointError, match="Rank 1: OSError: full"):
        transaction.complete(lambda folder: folder.write_json("a", 1), team, Facts())
    assert list(tmp_path.iterdir()) == []


def test_machines_without_a_common_disk_are_told(tmp_path: Path) -> None:
    transaction = Transaction(tmp_path / "state", tmp_path / "not here")
    with pytest.raises(CheckpointError, match="save_on_each_node"):
        transaction.complete(lambda folder: None, solo(), Facts())


def test_each_machine_has_its_leader_and_its_files() -> None:
    topology = Topology(5, 8, 1, 4, "test")
    shared, own = (Team(SoloCommunicator(), topology, each_node) for each_node in (False, True))
    assert (shared.leads, shared.leader) == (False, 0)
    assert (own.leads, own.leader) == (False, 4)
    assert Team(SoloCommunicator(), Topology(4, 8, 0, 4, "test"), True).leads
    team = Team(Rehearsed([(0, "other machine"), (4, "this machine")]), topology, True)
    assert team.share("here", "target", "done") == ["here", "this machine"]


def test_a_pending_save_is_waited_for_and_its_failure_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    done = PendingSave(Path("state"), lambda: None)
    assert done.wait() == Path("state")
    assert done.done()

    def fail() -> None:
        raise CheckpointError("full")

    failed = PendingSave(Path("state"), fail)
    with pytest.raises(CheckpointError, match="full"):
        failed.wait()
    assert "full" in caplog.text


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
