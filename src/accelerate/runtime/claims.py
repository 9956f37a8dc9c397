"""Claim a folder for one process, so that no two runs save into it.

A claim is a hidden file beside the folder. It names its holder and stays until that one ends; nobody needs one to read.
Processes of another machine or container cannot be seen. So a thread of the holder raises a counter, its pulse, in a file
beside the claim: a holder whose pulse stands still is dead. No clocks are compared.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path

from accelerate._base.errors import CheckpointError, ConfigurationError, printable
from accelerate._base.untrusted import parse_json, read_limited
from accelerate.runtime.atomic import HIDDEN, Owner, atomic_file, remove_abandoned

_LOG = logging.getLogger(__name__)
CLAIM = "accelerate-claim"
PULSE = "accelerate-pulse-"
_SECONDS_BETWEEN_PULSES = 5.0
_SECONDS_OF_SILENCE = 60.0
"""A holder that cannot be seen is dead when its pulse stands still for so long."""
_SECONDS_TO_DIE = 5.0
"""A holder that can be seen gets this time: its successor may be here before it has ended."""
_SECONDS_BETWEEN_LOOKS = 0.1
_MOST_BYTES = 10_000
"""Of a claim or a pulse: what is longer was not written here."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_RUN = re.compile(r"[0-9a-f]{1,32}")


@dataclass(frozen=True)
class Holder:
    """What a claim says.

    Args:
        owner: The process that holds it; None if the file is being written or was cut.
        run: What tells this holder from others that had the same process number.
    """

    owner: Owner | None
    run: str = ""

    @classmethod
    def read(cls, file: Path) -> Holder | None:
        """Return what a claim says, None if there is none.

        Raises:
            CheckpointError: If something else is in its place.
        """
        try:
            facts = parse_json(read_limited(file, _MOST_BYTES))
            owner, run = Owner.parse(facts["owner"]), facts["run"]
            return cls(owner, run) if _RUN.fullmatch(run) else cls(None)
        except OSError as error:
            if file.is_symlink() and not file.exists():
                raise _no_claim(file, "a link that leads nowhere") from error
            if isinstance(error, FileNotFoundError):
                return None
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigurationError) and file.exists() and not file.is_file():
                raise _no_claim(file, "a folder, a pipe, a socket or a device") from error
            return cls(None)

    def to_json(self) -> str:
        """Return what is written to the file."""
        assert self.owner is not None
        facts = {"host": self.owner.host, "process": self.owner.process, "owner": self.owner.tag, "run": self.run}
        return json.dumps(facts) + "\n"

    def pulse_beside(self, file: Path) -> Path:
        """Return the file with the counter."""
        assert self.owner is not None
        return file.with_name(f"{HIDDEN}{PULSE}{self.owner.tag}-{self.run}")

    def signs_of_life(self, file: Path) -> list[bytes]:
        """Return what changes as long as the holder lives."""
        found = []
        for entry in (file,) if self.owner is None else (file, self.pulse_beside(file)):
            with suppress(FileNotFoundError, ConfigurationError):  # what is no file, or too long, is no sign
                found.append(read_limited(entry, _MOST_BYTES))
        return found


def _no_claim(file: Path, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{str(file)!r} is {kind}, and a file that says who saves into the folder is expected there. No run of this library "
        "makes it so. Remove it, or save into another folder."
    )


class Claims:
    """The claims of this process, and the pulses beside them."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.holder = Holder(Owner.this_process(), uuid.uuid4().hex[:8])
        self.files: set[Path] = set()
        self.shared: set[Path] = set()
        """Claims that another process of this run holds."""
        self._pulses: dict[Path, tuple[int, int]] = {}
        """The counter in each file, and the inode that this process created for it."""
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        # Not `atexit`: a process of multiprocessing ends without it.
        Finalize(None, self.release_all, exitpriority=0)

    def hold(self, file: Path) -> None:
        """Keep a claim that names this process."""
        self.files.add(file)
        pulse = self.holder.pulse_beside(file)
        if pulse not in self._pulses or not os.path.lexists(pulse):
            try:
                # Exclusively: others who may write here must not lead this process to another file of its user.
                handle = os.open(pulse, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    self._pulses[pulse] = (0, os.fstat(handle).st_ino)
                    stream.write(_counter(0))
            except FileExistsError as error:
                raise CheckpointError(
                    f"{str(pulse)!r} already exists, and no other process creates this file. Remove it if you know who did, or "
                    "save into another folder."
                ) from error
            except OSError as error:
                _LOG.warning("The heartbeat of this process could not be written: %s", error)
        if self._thread is None:
            self._ending.clear()
            self._thread = threading.Thread(target=self._beat, name="accelerate-pulse", daemon=True)
            self._thread.start()

    def release_all(self) -> None:
        """Give up all claims."""
        self.shared.clear()
        self.release(tuple(self.files))

    def release(self, files: Iterable[Path]) -> None:
        """Give up claims; what another process has taken over meanwhile is left to it."""
        for file in files:
            self.files.discard(file)
            with suppress(OSError, CheckpointError):
                if Holder.read(file) == self.holder:
                    file.unlink()
        if not self.files and self._thread is not None:
            self._ending.set()
            self._thread.join(_SECONDS_TO_DIE)
            self._thread = None
        for pulse in self._pulses.keys() - {self.holder.pulse_beside(file) for file in self.files}:
            del self._pulses[pulse]
            with suppress(OSError):
                pulse.unlink()

    def _beat(self) -> None:
        while not self._ending.wait(_SECONDS_BETWEEN_PULSES):
            for pulse, (count, inode) in list(self._pulses.items()):
                self._pulses[pulse] = (count + 1, inode)
                # A file that is gone is not made again: whoever is removing the folder would find it not empty.
                # A named pipe in its place would otherwise block this thread, and with it all other heartbeats.
                flags = os.O_WRONLY | _NO_LINK | _NO_WAIT
                with suppress(OSError), os.fdopen(os.open(pulse, flags), "w") as stream:
                    if os.fstat(stream.fileno()).st_ino == inode:  # and not a link to another file
                        stream.write(_counter(count + 1))


def _counter(count: int) -> str:
    return f"{count:020d}\n"  # of one length, so that it can be written over


def claim(folder: Path) -> None:
    """Claim a folder for this process until it ends or `release` is called; a second time changes nothing.

    Raises:
        CheckpointError: If a process holds it that lives, or something else is in the place of the claim.
    """
    try:
        _claim(folder)
    except OSError as error:
        # What is done next may still work, or tells better what is wrong.
        _LOG.warning("%s could not be claimed, so other runs are not kept out of it: %s", printable(folder), error)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold a claim inside the block, and after it only if it was held before.

    Raises:
        CheckpointError: If a process holds it that lives.
    """
    file = _file_of(folder)
    was_held = file in _own().files
    claim(folder)
    try:
        yield
    finally:
        if not was_held:
            _own().release([file])


def check(folder: Path) -> None:
    """Make sure that a claimed folder is still this process's.

    Raises:
        CheckpointError: If another process has taken it over, because this one stood still for long.
    """
    own, file = _own(), _file_of(folder)
    if file not in own.files:
        return  # it could not be claimed
    with suppress(OSError):  # whatever is gone is told by what is done next
        if not _create(file, own.holder):
            holder = Holder.read(file) or own.holder
            if holder != own.holder:
                raise CheckpointError(
                    f"{str(folder)!r} was taken over by {holder.owner or 'another process'} while this process stood "
                    "still or could not be reached. Give one of the two runs a folder of its own."
                )


def share(folder: Path) -> None:
    """Remember that a folder belongs to the run of this process, whichever of its processes has claimed it."""
    _own().shared.add(_file_of(folder))


def other_run(folder: Path) -> Owner | None:
    """Return the process of another run that has claimed a folder; None if there is none, or it has ended."""
    file = _file_of(folder)
    holder = None
    if file not in _own().shared:
        with suppress(OSError, CheckpointError):  # whoever writes is told
            holder = Holder.read(file)
    if holder is None or holder.owner is None or holder.owner.is_alive() is False:
        return None
    return holder.owner


def release() -> None:
    """Give up everything that this process has claimed."""
    _own().release_all()


def _own() -> Claims:
    """Return the claims of this process; a forked one has none of its parent's."""
    from accelerate.runtime import current  # it loads torch, which not all who read checkpoints need

    found: Claims | None = current.CLAIMS.get("claims")
    if found is None or found.process != os.getpid():
        found = current.CLAIMS["claims"] = Claims()
    return found


def _file_of(folder: Path) -> Path:
    """Return where the claim of a folder is: beside it, unless that is another disk or not allowed."""
    is_disk = os.path.ismount(folder)  # before Python 3.12 pathlib does not answer on Windows
    if folder.is_dir() and (is_disk or not os.access(folder.parent, os.W_OK)):
        return folder / f"{HIDDEN}{CLAIM}"
    return folder.with_name(f"{HIDDEN}{folder.name}.{CLAIM}")


def _claim(folder: Path) -> None:
    own, file = _own(), _file_of(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file not in own.files:
        _remove_dead(file.parent)
    while not _create(file, own.holder):
        holder = Holder.read(file)
        if holder == own.holder:
            break
        is_over = holder is not None and _is_over(holder, file)
        if holder is None or Holder.read(file) != holder:
            continue  # it was given up, or changed hands
        if not is_over:
            raise CheckpointError(
                f"{str(folder)!r} is in use: {holder.owner or 'a process that is not known'} saves into it and still "
                "runs. Two runs that save into one folder replace and remove each other's checkpoints. Give this run a "
                "folder of its own, or end the other one."
            )
        with atomic_file(file, synced=False) as partial:  # two may do so at once: the last one holds it then
            partial.write_text(own.holder.to_json(), encoding="utf-8")
    own.hold(file)


def _create(file: Path, holder: Holder) -> bool:
    """Write a claim, and return whether there was none."""
    try:
        stream = file.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with stream:
            stream.write(holder.to_json())
    except OSError:
        file.unlink(missing_ok=True)  # the disk is full: nobody could tell whose it is
        raise
    return True


def _remove_dead(parent: Path) -> None:
    """Remove what processes of this machine have left that were killed."""
    for file in parent.glob(f"{HIDDEN}*{CLAIM}"):
        with suppress(CheckpointError, OSError):  # those of other folders, and of other users, do not matter here
            holder = Holder.read(file)
            if holder is not None and holder.owner is not None and holder.owner.is_alive() is False:
                file.unlink(missing_ok=True)
    remove_abandoned(parent, PULSE)


def _is_over(holder: Holder, file: Path) -> bool:
    """Return whether a holder has ended, or has started this process and so leaves the folder to it."""
    owner = holder.owner
    is_alive = owner.is_alive() if owner is not None else None
    if owner is not None and is_alive is not None:
        if not is_alive or owner.is_above():
            return True
        return _happens(lambda: not owner.is_alive() or Holder.read(file) != holder, _SECONDS_TO_DIE)
    _LOG.warning(
        "%s is held by %s, which cannot be seen from here: waiting for a sign of life for up to %.0f s.",
        printable(file),
        owner or "a process that is not known",
        _SECONDS_OF_SILENCE,
    )
    before = holder.signs_of_life(file)
    return not _happens(lambda: holder.signs_of_life(file) != before, _SECONDS_OF_SILENCE)


def _happens(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds, and return whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return True
