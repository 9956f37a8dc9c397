"""One load: every rank reads and verifies everything before the first thing is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import sealed
from accelerate.checkpointing.helper_thread import HelperThread
from accelerate.checkpointing.manifest import Manifest, Problem
from accelerate.checkpointing.parts.base import LoadOptions, Part
from accelerate.checkpointing.team import Failure, Team


class BrokenCheckpoint(CheckpointError):
    """Report a checkpoint whose files are not what was written."""


class Reading:
    """A checkpoint that is being read, on all ranks together.

    Checksums are compared in a second thread while the parts are read; each rank of a machine takes a share of the files.
    """

    def __init__(self, source: Path, team: Team) -> None:
        self.source = source
        self.manifest: Manifest | None = None
        self._team = team
        self._failure: Exception | None = None
        self._found: list[tuple[Part, Any]] = []
        try:
            if team.leads:
                sealed.finish(source)
        except OSError as error:
            self._failure = error
        team.communicator.barrier()
        try:
            self.manifest = Manifest.read(source)
        except CheckpointError as error:
            self._failure = error
        self._thread = HelperThread("accelerate-verify")
        self._problems = self._thread.submit(self._verify)

    def _verify(self) -> list[Problem]:
        if self.manifest is None:
            return []
        place = self._team.topology
        share = self.manifest.files[place.local_rank :: place.local_world_size]
        return self.manifest.problems(self.source, checksums=True, records=share)

    def read(self, collect: Callable[[Path], Sequence[Part]], options: LoadOptions) -> None:
        """Read the parts."""
        if self._failure is not None:
            return
        options = dataclasses.replace(options, manifest=self.manifest)
        try:
            self._found = [(part, part.read(self.source, options)) for part in collect(self.source)]
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
            self._failure = error

    def agree(self) -> None:
        """Wait for the verification, and raise the same error on all ranks if the checkpoint cannot be used.

        Raises:
            BrokenCheckpoint: If its files are not what was written.
            CheckpointError: If it could not be read, or does not fit this run.
        """
        team, failure = self._team, self._failure
        found = [
            str(problem) for entries in team.communicator.gather_object(self._problems.result()) for problem in entries
        ]
        if found:
            raise BrokenCheckpoint(
                f"The checkpoint {str(self.source)!r} is broken: {'; '.join(found)}. Nothing was loaded from it. Use "
                "another checkpoint; load_state() without a path takes the newest valid one."
            ) from failure
        try:
            team.share(Failure.of(team.rank, failure) if failure is not None else None, self.source, "loaded")
        except CheckpointError as error:
            raise error from failure

    def restore(self) -> None:
        """Take over what was read."""
        while self._found:
            part, payload = self._found.pop(0)
            part.restore(payload)

    def close(self) -> None:
        """End the helping thread."""
        self._thread.close()
