"""Run checks on all processes at once and tell how each of them ended, also when the collectives are what is broken."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from accelerate.runtime.torch_private import default_store

# A process that failed waits this long for the others: they are either done too, or held in a collective for ever.
SECONDS_AFTER_A_FAILURE = 10.0
SECONDS_OF_A_CHECK = 300.0
_FINE = "fine"
_HELD = "not done with this check"
_PAUSE = 0.002


class CheckFailure(AssertionError):
    """Report a value that is not the expected one."""


@dataclass(frozen=True)
class Check:
    """One line of the report and what stands behind it."""

    title: str
    function: Callable[[PeerStore], None]


class PeerStore:
    """Notes of all ranks to each other over the store of the process group, which needs no collective.

    Args:
        store: None for a process that is alone.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store if store is not None else HashStore()

    def post(self, key: str, text: str) -> None:
        """Leave a note for everybody."""
        self._store.set(key, text)

    def has(self, key: str) -> bool:
        """Say whether a note is there, without waiting for it."""
        return bool(self._store.check([key]))

    def is_first(self, key: str) -> bool:
        """Say whether this process is the first one that asks about a key."""
        return int(self._store.add(key, 1)) == 1

    def read(self, key: str, seconds: float) -> str | None:
        """Wait for a note; None when it does not come in time."""
        end = time.monotonic() + seconds
        # Asked again and again: a connection whose wait has run out cannot be used any more (torch 2.13).
        while not self.has(key):
            if time.monotonic() > end:
                return None
            time.sleep(_PAUSE)
        return self._store.get(key).decode()


def peer_store(rank: int, world_size: int) -> PeerStore:
    """Make the store of this process."""
    if world_size == 1 or not dist.is_initialized():
        return PeerStore(rank, world_size, None)
    # The agent or rank 0 keeps it, whatever the backend of the collectives is.
    return PeerStore(rank, world_size, PrefixStore("self-check", default_store()))


def expect(found: Any, wanted: Any, what: str) -> None:
    """Compare two values, tensors exactly.

    Raises:
        CheckFailure: They differ.
    """
    if isinstance(wanted, torch.Tensor):
        alike = (
            isinstance(found, torch.Tensor)
            and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            and torch.equal(found.cpu(), wanted.cpu())
        )
    else:
        alike = bool(found == wanted)
    if not alike:
        raise CheckFailure(f"{what} gave {found!r} where {wanted!r} is right")


def expect_close(found: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float) -> None:
    """Compare two tensors of floats.

    Raises:
        CheckFailure: They differ by more than the tolerance.
    """
    difference = (found.detach().cpu().double() - wanted.detach().cpu().double()).abs().max().item()
    if not difference <= tolerance:
        raise CheckFailure(f"{what} differs by {difference:.3g}, which is more than {tolerance:g}")


def run_checks(checks: Sequence[Check], peers: PeerStore) -> int:
    """Run the checks in order, print a line for each, and return the exit code.

    After a check that failed on some processes only, the rest is not run: these may be out of step by then.
    """
    width = max(len(check.title) for check in checks) + 2
    begun = time.perf_counter()
    failed = 0
    for number, check in enumerate(checks):
        start = time.perf_counter()
        own = _attempt(check, peers)
        outcomes = _exchange(peers, f"outcome/{number}", own)
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text != _FINE]
        line = f"  {check.title:<{width}}{'FAILED' if problems else 'ok':<8}{time.perf_counter() - start:7.2f} s\n"
        details = "".join(f"      {part}\n" for problem in problems for part in problem.splitlines())
        if (problems and peers.is_first(f"reported/{number}")) or (not problems and peers.rank == 0):
            _print(line + details)
        failed += bool(problems)
        if problems and (_FINE in outcomes or any(_HELD in text for text in outcomes)):
            if peers.is_first("reported/rest"):
                _print("".join(f"  {left.title:<{width}}not run\n" for left in checks[number + 1 :]))
            break
    if peers.rank == 0 and not failed:
        _print(f"All {len(checks)} checks passed in {time.perf_counter() - begun:.1f} s.\n")
    elif failed and peers.is_first("reported/end"):
        _print(f"{failed} of {len(checks)} checks failed.\n")
    return 1 if failed else 0


def _attempt(check: Check, peers: PeerStore) -> str:
    try:
        check.function(peers)
    except Exception as error:  # noqa: BLE001 - whatever a check raises is its result
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = " ".join(str(error).split())
        return f"{type(error).__name__}: {message} (at {Path(place.filename).name}:{place.lineno})"
    return _FINE


def _exchange(peers: PeerStore, key: str, own: str) -> list[str]:
    peers.post(f"{key}/{peers.rank}", own)
    limit = SECONDS_OF_A_CHECK if own == _FINE else SECONDS_AFTER_A_FAILURE
    end = time.monotonic() + limit
    outcomes = []
    for rank in range(peers.world_size):
        outcome = peers.read(f"{key}/{rank}", end - time.monotonic())
        outcomes.append(outcome or f"{_HELD} {limit:.0f} s later, probably held in a collective")
    return outcomes


def _print(text: str) -> None:
    # One write, so that lines of several processes do not mix.
    sys.stdout.write(text)
    sys.stdout.flush()
