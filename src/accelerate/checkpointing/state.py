"""Save and load a checkpoint of a run, on all ranks together: `Checkpointer.save` and `Checkpointer.load`, top to bottom."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from accelerate._base.errors import CheckpointError, MissingFileError, printable
from accelerate.checkpointing.catalog import newest_valid, prune
from accelerate.checkpointing.files import FileProblem, FileRecord, FolderWriter, PendingSave, WorkerThread
from accelerate.checkpointing.manifest import (
    UNTOUCHED,
    Facts,
    Manifest,
    describe_failure,
    finish_publish,
    moment_in,
    publish,
)
from accelerate.checkpointing.parts import LoadOptions, ModelPart, Part, Prepared, WeightsPart
from accelerate.checkpointing.run_parts import check_custom_count
from accelerate.checkpointing.snapshot import Snapshot
from accelerate.collectives.base import Communicator, communicator
from accelerate.collectives.torch_dist import TorchDistCommunicator
from accelerate.config.plugins.training import ProjectConfiguration
from accelerate.runtime import claims, current
from accelerate.runtime.atomic import discard_stage, make_stage
from accelerate.runtime.current import Topology

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_NOT_SAVED = "saved; nothing was published, and earlier ones are untouched"
SaveHook = Callable[[list[torch.nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[torch.nn.Module], str], None]


class BrokenCheckpoint(CheckpointError):
    """Report a checkpoint whose files are not what was written."""

    problem = ""
    """What is wrong with its files."""


class IncompleteCheckpoint(BrokenCheckpoint, MissingFileError):
    """Report a checkpoint that lacks a file."""


class DividesState(Protocol):
    """A strategy, which knows of what parts the state of prepared objects is."""

    def checkpoint_parts(self, prepared: Prepared) -> list[Part]:
        """Return the parts of a checkpoint, in the order in which they are written and restored."""


@dataclass(frozen=True)
class RunState:
    """What is saved and loaded.

    Args:
        strategy: Divides the state of the prepared objects into parts.
        prepared: The prepared objects.
        run_parts: What belongs to the run and to no strategy, in order.
    """

    strategy: DividesState
    prepared: Prepared
    run_parts: Sequence[Part]


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run that write and read one checkpoint together, seen from one of them.

    Args:
        communicator: How they talk.
        topology: The rank's place.
        each_node: Every machine has a disk of its own, and its first rank writes what all ranks have in common.
        process_group: Over which they talk; the default one if None.
    """

    communicator: Communicator
    topology: Topology
    each_node: bool = False
    process_group: dist.ProcessGroup | None = None

    @property
    def leader(self) -> int:
        """The rank that leads on the disk of this one: it writes what all ranks have in common, and publishes."""
        return self.topology.rank - self.topology.local_rank if self.each_node else 0

    @property
    def leads(self) -> bool:
        """Whether this rank is the leading one."""
        return self.topology.rank == self.leader

    def agree(self, value: T | Exception | None, target: Path, doing: str) -> list[T]:
        """Return the values of the ranks that write to the same disk, in the order of ranks.

        Args:
            value: What this rank has; an exception if it failed.

        Raises:
            CheckpointError: The same on every rank, if any rank has failed.
        """
        error = value if isinstance(value, Exception) else None
        kind = MissingFileError if isinstance(error, FileNotFoundError) else CheckpointError
        own = (self.leader, value, None) if error is None else (self.leader, None, (kind, named(error)))
        answers: list[tuple[int, Any, Any]] = self.communicator.gather_object(own)
        failures = [(rank, *failure) for rank, (_, _, failure) in enumerate(answers) if failure is not None]
        if failures:
            rank, kind, failure = failures[0]
            others = f" ({len(failures) - 1} other rank(s) failed too)" if len(failures) > 1 else ""
            raise kind(
                f"The checkpoint {str(target)!r} could not be {doing}. Rank {rank}: {failure}{others}"
            ) from error
        return [answer for leader, answer, _ in answers if leader == self.leader]


@dataclass
class Checkpointer:
    """Save and load the state of a run; at most one save runs in the background.

    Args:
        project: Says whether every machine keeps a copy on a disk of its own.
    """

    project: ProjectConfiguration
    _pending: PendingSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"project": self.project, "_pending": None}  # a thread is a matter of its process

    def rank_group(self, *, background: bool = False) -> RankGroup:
        """Return the ranks of the run.

        Args:
            background: They talk beside training, over a process group of their own.
        """
        runtime = current.runtime()
        each_node = self.project.save_on_each_node
        if background and runtime.is_distributed:
            process_group = current.remember("checkpoint process group", _new_process_group)
            return RankGroup(TorchDistCommunicator(process_group), runtime, each_node, process_group)
        return RankGroup(communicator(), runtime, each_node)

    def save(
        self,
        target: Path,
        state: RunState,
        facts: Facts,
        *,
        hooks: Sequence[SaveHook] = (),
        blocking: bool = True,
        claimed: Path | None = None,
        keep: int | None = None,
    ) -> None:
        """Save a checkpoint, which appears as a whole or not at all; every rank calls it.

        Args:
            facts: Where the run stands.
            hooks: Called with the models, their weights and the folder; weights that one takes out are not written, and
                what it writes to the folder becomes part of the checkpoint.
            blocking: Wait until it is on the disk; otherwise return when training can go on.
            claimed: The folder that no other run may save into from now on; the target if None.
            keep: How many numbered checkpoints beside the target stay, with this one; all if None.

        Raises:
            CheckpointError: If it, or the one before that was saved in the background, could not be saved; also if
                another run saves into this folder.
        """
        self.wait()
        group, claimed = self.rank_group(background=not blocking), claimed or target
        stage = _make_common_stage(target, claimed, self.rank_group())
        # Made here and not by a saving thread: threads cannot be started any more while the interpreter ends.
        folder = FolderWriter(stage, group.process_group)
        save = StagedSave(target, folder, group, facts, keep, claimed=claimed)
        try:
            # Collect.
            parts = [*_let_hooks_write(state, hooks, stage), *state.run_parts]
            # Snapshot.
            save.snapshot = Snapshot(part for part in parts if part.everywhere or group.leads)
            if not blocking:
                save.snapshot.copy_to_host()
        except Exception as error:  # noqa: BLE001 - the other ranks hear of it before they write
            save.failure = error
        except BaseException:
            save.discard()
            raise
        # Write, agree, publish, rotate.
        if blocking:
            save.complete()
        else:
            self._pending = PendingSave(target, save.complete)

    def wait(self) -> Path | None:
        """Wait for the save in the background, and return its folder; None if there is none.

        Raises:
            CheckpointError: If it could not be saved.
        """
        pending, self._pending = self._pending, None
        return pending.wait() if pending is not None else None

    def close(self) -> None:
        """Wait for the save in the background, and leave the folders that were saved into to other runs.

        Raises:
            CheckpointError: If it could not be saved.
        """
        try:
            self.wait()
        finally:
            claims.release()

    def load(
        self, source: Path, state: RunState, options: LoadOptions, *, hooks: Sequence[LoadHook] = ()
    ) -> Manifest | None:
        """Load a checkpoint, and return its manifest; every rank calls it, and reads all before it changes anything.

        Args:
            hooks: Called with the models and the folder; models that one takes out are not loaded.

        Raises:
            BrokenCheckpoint: If its files are not what was written; nothing has been changed then.
            CheckpointError: If it does not fit this run; nothing has been changed then, if it does not say otherwise.
        """
        group = self.rank_group()
        found: list[tuple[Part, Any]] = []
        # Find.
        manifest, failure = _find(source, group)
        # Verify, in a second thread while the parts are read; each rank of a machine takes a share of the files.
        thread = WorkerThread("accelerate-verify")
        try:
            problems = thread.submit(partial(_verify, source, manifest, group.topology))
            if hooks:  # they do what they like with the program: not before the checkpoint is known to be good
                _agree_to_load(source, group, problems, failure)
            # Read.
            if failure is None:
                try:
                    models = list(state.prepared.models)
                    for hook in hooks:
                        hook(models, str(source))
                    check_custom_count(source, state.run_parts)
                    prepared = replace(state.prepared, models=models)
                    parts = [*state.strategy.checkpoint_parts(prepared), *state.run_parts]
                    options = replace(options, manifest=manifest)
                    found = [(part, part.read(source, options)) for part in parts]
                except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
                    failure = error
            # Agree.
            _agree_to_load(source, group, problems, failure)
            # Restore.
            while found:
                part, payload = found.pop(0)
                _restore(part, payload, source)
        finally:
            thread.close()
        return manifest

    def load_newest(
        self, folder: Path, state: RunState, options: LoadOptions, *, hooks: Sequence[LoadHook] = ()
    ) -> tuple[Path, Manifest | None]:
        """Load the newest valid checkpoint in a folder, and return it with its manifest; arguments are those of `load`.

        Raises:
            CheckpointError: If there is none, or it does not fit this run.
        """
        group = self.rank_group()
        broken: dict[Path, str] = {}
        while True:
            choices = [newest_valid(folder, without=broken)]
            group.communicator.broadcast_objects(choices)
            newest = choices[0]
            if newest.value is None:
                raise CheckpointError(
                    f"No checkpoint was loaded: {newest.reason}. Give load_state() the folder of a checkpoint, or start "
                    "anew in another folder."
                )
            path = newest.value.path
            if group.topology.rank == 0:
                level = logging.WARNING if newest.passed_over else logging.INFO  # what was trained after it is lost
                _LOG.log(level, "Loading %s: %s.", printable(path), newest.reason)
            try:
                return path, self.load(path, state, options, hooks=hooks)
            except BrokenCheckpoint as error:
                broken[path] = error.problem


def named(error: Exception) -> str:
    """Return the text of an error, with its type unless it is one of ours."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _new_process_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def _make_common_stage(target: Path, claimed: Path, group: RankGroup) -> Path:
    """Keep other runs out, and make the folder in which all ranks of a disk write."""
    outcome: Path | Exception | None = None
    if group.leads:
        try:
            claims.claim(claimed)
            outcome = make_stage(target, claimed)
        except (OSError, CheckpointError) as error:
            outcome = error
    try:
        stage, *_ = group.agree(outcome, target, "begun")
    except CheckpointError:
        if isinstance(outcome, Path):  # it was another machine, with a disk of its own, that could not begin
            discard_stage(outcome)
        raise
    assert stage is not None  # the first rank of a disk leads
    claims.share(claimed)
    return stage


def _let_hooks_write(state: RunState, hooks: Sequence[SaveHook], stage: Path) -> list[Part]:
    """Let hooks take over the writing of weights, and return the parts of the prepared objects that are left."""
    prepared = state.prepared
    parts = state.strategy.checkpoint_parts(prepared)
    if not hooks:
        return parts
    weights: list[Any] = [part.weights() for part in parts if isinstance(part, ModelPart)]
    for hook in hooks:
        hook(list(prepared.models), weights, str(stage))
    safe = prepared.safe_serialization
    left = [WeightsPart(entry, index, safe_serialization=safe) for index, entry in enumerate(weights)]
    return [*left, *(part for part in parts if not isinstance(part, ModelPart))]


@dataclass
class StagedSave:
    """A checkpoint in the making, from its snapshot on; the rest may run in another thread."""

    target: Path
    folder: FolderWriter
    group: RankGroup
    facts: Facts
    keep: int | None
    snapshot: Snapshot = field(default_factory=Snapshot)
    failure: Exception | None = None
    """What went wrong on this rank before there was something to write."""
    claimed: Path | None = None
    """The folder that other runs are kept out of; the target if None."""

    def complete(self) -> None:
        """Write, agree, publish and rotate. Every rank calls it.

        Raises:
            CheckpointError: The same on all ranks, if one of them failed; it leaves no trace then.
        """
        group, target = self.group, self.target
        try:
            failure = self.failure
            try:
                # First of all, so that no optimizer waits until other parts are written.
                self.snapshot.resolve()
            except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
                failure = error
            # Before anything is written: ranks that write shards wait for each other meanwhile.
            group.agree(failure, target, _NOT_SAVED)
            written = group.agree(self._write(), target, _NOT_SAVED)
            published = self._publish([record for records in written for record in records]) if group.leads else None
            if group.leads and published is None and self.keep:
                self._rotate(self.keep)
            group.agree(published, target, "published")
        except BaseException:
            self.discard()
            raise
        finally:
            self.snapshot.release()
        self.folder.close()

    def _write(self) -> list[FileRecord] | Exception:
        """Write the files of this rank, and return their records once they are on the disk.

        Raises:
            CheckpointError: The same on all ranks, if one failed before they were to write a part together.
        """
        stage = self.folder.path
        failure: Exception | None = None
        if not stage.is_dir():
            failure = CheckpointError(
                f"{str(stage)!r}, created by the leading rank, is not visible here: it was removed, or the machines have no "
                "common disk at this place. Keep it, save to a shared folder, or use "
                "ProjectConfiguration(save_on_each_node=True)."
            )
        for part, payload in self.snapshot:
            if getattr(part, "is_written_together", False):
                # A rank that has failed would not join the collectives, and the others would wait for it or abort.
                self.group.agree(failure, self.target, _NOT_SAVED)
            try:
                if failure is None:
                    part.write(payload, self.folder)
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
                failure = error
        try:
            return self.folder.finish() if failure is None else failure
        except Exception as error:  # noqa: BLE001 - the same
            return error

    def _publish(self, records: list[FileRecord]) -> Exception | None:
        """Make what all ranks of this disk have written the checkpoint."""
        stage = self.folder.path
        try:
            known = {record.name for record in records}
            files = sorted(file for file in stage.rglob("*") if file.is_file())
            # Hooks of the program may have written here too.
            strays = [file for file in files if file.relative_to(stage).as_posix() not in known]
            records += [FileRecord.of(file, stage) for file in strays]
            world_size, created = self.group.topology.world_size, moment_in(self.target.parent)
            manifest = Manifest(tuple(records), world_size, self.facts, created)
            # Somebody may have cleaned up meanwhile: a folder with holes must not take the place of a whole one.
            problems = manifest.problems(stage, checksums=False)
            if problems:
                raise CheckpointError(
                    f"What was written to {str(stage)!r} is not there any more: {'; '.join(map(str, problems))}. Keep "
                    "other programs from this folder while a checkpoint is saved."
                )
            claims.check(self.claimed or self.target)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            return _unpublished(error, UNTOUCHED)
        try:
            publish(stage, self.target, manifest)
        except Exception as error:  # noqa: BLE001 - the same
            return _unpublished(error, describe_failure(self.target, manifest))
        return None

    def _rotate(self, keep: int) -> None:
        """Remove older checkpoints beside this one."""
        try:
            prune(self.target.parent, keep, spare=self.target)
        except (OSError, CheckpointError) as error:
            _LOG.warning("Older checkpoints in %s were not removed: %s", printable(self.target.parent), error)

    def discard(self) -> None:
        """Give up: remove what was written."""
        self.folder.close()
        if self.group.leads:
            discard_stage(self.folder.path)


def _unpublished(error: Exception, left: str) -> CheckpointError:
    """Return the error for a checkpoint that is not in place, with what there is of it."""
    failure = CheckpointError(f"{named(error).removesuffix('.')}. {left}")
    failure.__cause__ = error
    return failure


def _find(source: Path, group: RankGroup) -> tuple[Manifest | None, Exception | None]:
    """Put a checkpoint in place that a killed save had decided, and return its manifest, or what is wrong with it."""
    failure: Exception | None = None
    if group.leads:
        try:
            finish_publish(source)
        except (OSError, CheckpointError) as error:
            failure = error
    group.communicator.barrier()
    try:
        return Manifest.read(source), failure
    except CheckpointError as error:
        return None, error


def _verify(source: Path, manifest: Manifest | None, topology: Topology) -> list[FileProblem]:
    """Return what is wrong with this rank's share of the files."""
    if manifest is None:
        return []
    share = manifest.files[topology.local_rank :: topology.local_world_size]
    return manifest.problems(source, checksums=True, records=share)


def _restore(part: Part, payload: Any, source: Path) -> None:
    """Let a part take over what was read.

    Raises:
        CheckpointError: If it does not, when others have already.
    """
    try:
        part.restore(payload)
    except Exception as error:
        raise CheckpointError(
            f"{part.name[:1].upper()}{part.name[1:]} did not take over what {str(source)!r} holds of it ({named(error)}). The run "
            "is half restored: start the program again, with the objects as they were when it was saved, or with another "
            "checkpoint."
        ) from error


def _agree_to_load(
    source: Path, group: RankGroup, problems: Future[list[FileProblem]], failure: Exception | None
) -> None:
    """Wait for the verification, and raise the same error on all ranks if the checkpoint cannot be used."""
    found = [problem for share in group.communicator.gather_object(problems.result()) for problem in share]
    if found:
        problem = "; ".join(map(str, found))
        kind = IncompleteCheckpoint if any(entry.is_missing for entry in found) else BrokenCheckpoint
        broken = kind(
            f"The checkpoint {str(source)!r} is broken: {problem}. Nothing was loaded from it. Use another checkpoint; "
            "load_state() without a path takes the newest valid one."
        )
        broken.problem = problem
        raise broken from failure
    group.agree(failure, source, "loaded")
