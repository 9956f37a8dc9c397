"""One save as a transaction: staged beside its target, written by all ranks, sealed, published by one rename.

A failure on any rank is the same error on all; it leaves no trace, and earlier checkpoints as they were.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import sealed
from accelerate.checkpointing.folder import StagedFolder, record_of
from accelerate.checkpointing.manifest import Facts, FileRecord, Manifest
from accelerate.checkpointing.names import MANIFEST
from accelerate.checkpointing.team import Failure, Team
from accelerate.runtime import atomic

_NOT_SAVED = "saved; nothing was published, and earlier ones are untouched"


class Transaction:
    """A checkpoint in the making.

    Args:
        target: The folder that it will be.
        stage: The folder that it is made in; the same on all ranks of a disk.
    """

    def __init__(self, target: Path, stage: Path) -> None:
        self.target = target
        self.stage = stage
        # Made here and not by a saving thread: threads cannot be started any more while the interpreter ends.
        self._folder = StagedFolder(stage)

    @classmethod
    def begin(cls, target: Path, team: Team) -> Transaction:
        """Make the stage. Every rank calls it.

        Raises:
            CheckpointError: If the folder cannot be made.
        """
        outcome: Path | Failure | None = None
        if team.leads:
            try:
                outcome = atomic.make_stage(target)
            except OSError as error:
                outcome = Failure.of(team.rank, error)
        stage, *_ = team.share(outcome, target, "begun")
        assert stage is not None  # the first rank of a disk leads
        return cls(target, stage)

    def complete(
        self,
        write: Callable[[StagedFolder], None],
        team: Team,
        facts: Facts,
        *,
        failure: Exception | None = None,
        afterwards: Callable[[], None] | None = None,
    ) -> None:
        """Write, agree and publish. Every rank calls it.

        Args:
            write: Writes the files of this rank.
            failure: What went wrong on this rank before there was something to write.
            afterwards: What the leading ranks do once it is published, before any rank goes on.

        Raises:
            CheckpointError: The same on all ranks, if one of them failed.
        """
        try:
            # Before anything is written: ranks that write shards wait for each other meanwhile.
            team.share(None if failure is None else Failure.of(team.rank, failure), self.target, _NOT_SAVED)
            try:
                outcome: list[FileRecord] | Failure = self._write(write)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
                failure, outcome = error, Failure.of(team.rank, error)
            written = team.share(outcome, self.target, _NOT_SAVED)
            published = self._publish([record for entry in written for record in entry], team, facts)
            if afterwards is not None and team.leads and published is None:
                afterwards()
            team.share(published, self.target, "published; earlier ones are untouched")
        except BaseException as error:
            self.discard(team)
            if isinstance(error, CheckpointError) and error is not failure:
                raise error from failure
            raise
        self._folder.close()

    def _write(self, write: Callable[[StagedFolder], None]) -> list[FileRecord]:
        if not self.stage.is_dir():
            raise CheckpointError(
                f"{str(self.stage)!r}, made by the leading rank, is not to be seen here: the machines have no common "
                "disk at this place. Save to a shared folder, or use ProjectConfiguration(save_on_each_node=True)."
            )
        write(self._folder)
        return self._folder.finish()

    def _publish(self, records: list[FileRecord], team: Team, facts: Facts) -> Failure | None:
        if not team.leads:
            return None
        try:
            known = {record.name for record in records}
            files = sorted(file for file in self.stage.rglob("*") if file.is_file())
            # Hooks of the program may have written here too.
            strays = [file for file in files if file.relative_to(self.stage).as_posix() not in known]
            records += [record_of(file, self.stage) for file in strays]
            publish(self.stage, self.target, Manifest(tuple(records), team.world_size, facts))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            return Failure.of(team.rank, error)
        return None

    def discard(self, team: Team) -> None:
        """Give up: remove what was written."""
        self._folder.close()
        if team.leads:
            shutil.rmtree(self.stage, ignore_errors=True)


def publish(stage: Path, target: Path, manifest: Manifest) -> None:
    """Make a complete stage the checkpoint `target`, for good."""
    path = stage / MANIFEST
    path.write_text(json.dumps(manifest.to_json(), indent=2) + "\n", encoding="utf-8")
    atomic.sync(path)
    for folder in {stage, *((stage / record.name).parent for record in manifest.files)}:
        atomic.sync(folder)
    if stage.parent == target:
        sealed.seal(stage, target)
    else:
        atomic.swap_folder(stage, target)
