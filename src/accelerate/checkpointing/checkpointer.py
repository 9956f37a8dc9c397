"""Save and load a checkpoint made of parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from accelerate._base.errors import CheckpointError
from accelerate._base.helpers import Choice
from accelerate.checkpointing.background import PendingSave, background_communicator
from accelerate.checkpointing.catalog import CheckpointInfo, newest_valid
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.manifest import Facts, Manifest
from accelerate.checkpointing.parts import later
from accelerate.checkpointing.parts.base import LoadOptions, Part
from accelerate.checkpointing.parts.host_copy import host_buffers
from accelerate.checkpointing.reading import BrokenCheckpoint, Reading
from accelerate.checkpointing.team import Team
from accelerate.checkpointing.transaction import Transaction
from accelerate.collectives import communicator
from accelerate.config.plugins.training import ProjectConfiguration
from accelerate.runtime import current

_LOG = logging.getLogger(__name__)
Collect = Callable[[Path], Sequence[Part]]
"""Returns the parts; it is given the folder in which the checkpoint is made, or from which it is read."""


class Checkpointer:
    """Save and load parts, on all ranks together; at most one save runs in the background.

    Args:
        project: Says whether every machine keeps a copy on a disk of its own.
    """

    def __init__(self, project: ProjectConfiguration) -> None:
        self.project = project
        self._pending: PendingSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"project": self.project, "_pending": None}  # a thread is a matter of its process

    def team(self, *, background: bool = False) -> Team:
        """Return the ranks of the run."""
        talk = background_communicator() if background else communicator()
        return Team(talk, current.runtime().topology, self.project.save_on_each_node)

    def save(
        self,
        target: Path,
        collect: Collect,
        facts: Facts,
        *,
        blocking: bool = True,
        afterwards: Callable[[], None] | None = None,
    ) -> None:
        """Save a checkpoint.

        Args:
            facts: Where the run stands.
            blocking: Wait until it is on the disk; otherwise return when training can go on.
            afterwards: What the leading ranks do once it is published.

        Raises:
            CheckpointError: If it, or the one before that was saved in the background, could not be saved.
        """
        self.wait()
        team = self.team(background=not blocking)
        transaction = Transaction.begin(target, self.team())
        buffers = host_buffers()
        payloads: list[tuple[Part, Any]] = []
        failure: Exception | None = None
        try:
            parts = [part for part in collect(transaction.stage) if part.everywhere or team.leads]
            payloads = [(part, part.snapshot(copy=not blocking)) for part in parts]
        except Exception as error:  # noqa: BLE001 - the other ranks hear of it before they write
            failure = error
        except BaseException:
            transaction.discard(team)
            raise

        def write(folder: StagedFolder) -> None:
            for part, payload in payloads:
                part.write(payload, folder)

        def work() -> None:
            nonlocal failure
            try:
                try:
                    # First of all, so that no optimizer waits until other parts are written.
                    payloads[:] = [(part, later.settled(payload)) for part, payload in payloads]
                except Exception as error:  # noqa: BLE001 - as above
                    failure = error
                transaction.complete(write, team, facts, failure=failure, afterwards=afterwards)
            finally:
                payloads.clear()
                if not blocking:
                    buffers.release()

        if blocking:
            work()
        else:
            self._pending = PendingSave(target, work)

    def wait(self) -> Path | None:
        """Wait for the save in the background, and return its folder; None if there is none.

        Raises:
            CheckpointError: If it could not be saved.
        """
        pending, self._pending = self._pending, None
        return pending.wait() if pending is not None else None

    def load(
        self, source: Path, collect: Collect, options: LoadOptions, *, verify_first: bool = False
    ) -> Manifest | None:
        """Load a checkpoint, and return its manifest.

        Args:
            verify_first: Verify before `collect` is called, because it does more than to say what the parts are.

        Raises:
            BrokenCheckpoint: If its files are not what was written; nothing has been changed then.
            CheckpointError: If it does not fit this run; nothing has been changed then.
        """
        with closing(Reading(source, self.team())) as reading:
            if verify_first:
                reading.agree()
            reading.read(collect, options)
            reading.agree()
            reading.restore()
            return reading.manifest

    def load_newest(
        self, folder: Path, collect: Collect, options: LoadOptions, *, verify_first: bool = False
    ) -> tuple[Path, Manifest | None]:
        """Load the newest valid checkpoint in a folder, and return it with its manifest.

        Raises:
            CheckpointError: If there is none, or it does not fit this run.
        """
        team = self.team()
        broken: set[Path] = set()
        while True:
            found: list[Choice[CheckpointInfo | None]] = [newest_valid(folder, without=broken)]
            team.communicator.broadcast_objects(found)
            chosen, reason = found[0].value, found[0].reason
            if chosen is None:
                raise CheckpointError(
                    f"No checkpoint was loaded: {reason}. Give load_state() the folder of a checkpoint, or start anew."
                )
            if team.rank == 0:
                _LOG.info("Loading %s: %s.", chosen.path, reason)
            try:
                return chosen.path, self.load(chosen.path, collect, options, verify_first=verify_first)
            except BrokenCheckpoint as error:
                _LOG.warning("Passing over a checkpoint: %s", error)
                broken.add(chosen.path)
