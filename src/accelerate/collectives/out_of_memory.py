"""Retry a function with smaller batches when memory runs out, on all ranks alike."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import math
import time
import traceback
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, overload

from torch._C._distributed_c10d import Store

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.runtime import current, process_group
from accelerate.runtime.gradient_clock import GradientState
from accelerate.runtime.memory import clear_device_cache, should_reduce_batch_size

R = TypeVar("R")
_LOG = logging.getLogger(__name__)
_SHORTEST_SLEEP_SECONDS, _LONGEST_SLEEP_SECONDS = 0.001, 0.2
"""Between two looks into the store a rank sleeps for a tenth of the time that it has waited so far, within these."""
_PATIENCE_SECONDS = 0.5
"""How long a rank that ran out of memory waits for the others to do so too, before it breaks the group."""
_GRACE_SECONDS = 10.0
"""How long a rank that failed waits, once it has hung up, for the others to come out of their collectives."""


class _End(str, Enum):
    """How a try ended on a rank."""

    DONE = "done"
    OUT_OF_MEMORY = "out_of_memory"
    INTERRUPTED = "interrupted"
    """Its collective broke, because another rank had hung up."""
    FAILED = "failed"


class _Attempt:
    """One try on all ranks: who is done, who ran out of memory, who failed otherwise.

    The ranks agree through the store where they met, because a rank that ran out of memory leaves the others blocked
    in a collective.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._store: Store | None = None

    @property
    def world_size(self) -> int:
        """Return the number of ranks; the function itself may be what starts this process."""
        runtime = current.active()
        return runtime.world_size if runtime is not None else 1

    @property
    def store(self) -> Store:
        """Return the store where the ranks met; a single process has none."""
        if self._store is None:
            self._store = process_group.store()
        return self._store

    def _key(self, word: str) -> str:
        if self._number is None:
            self._number = current.next_number("batch size attempt")
        return f"accelerate/batch_size/{self._number}/{word}"

    def _count(self, word: str) -> int:
        return int(self.store.add(self._key(word), 0)) if self.world_size > 1 else 0

    def _first(self, word: str, text: str) -> str:
        """Return what the first rank that came here said."""
        said: bytes = self.store.compare_set(self._key(word), "", text)
        return said.decode()

    def end_of(self, error: Exception) -> _End:
        """Return what an error says about this try."""
        if should_reduce_batch_size(error):
            return _End.OUT_OF_MEMORY
        # Before a rank has closed its connections no other can break a collective, and one that breaks is a RuntimeError.
        if self.ran_out or (self.connections_closed and isinstance(error, RuntimeError)):
            return _End.INTERRUPTED
        return _End.FAILED

    def report(self, end: _End, error: Exception | None = None) -> None:
        """Tell the other ranks how this try ended here."""
        if end is _End.FAILED:
            self._first("failure", f"rank {current.runtime().rank} failed with {type(error).__name__}: {error}")
        self.store.add(self._key(end.value), 1)
        if self.store.add(self._key("reports"), 1) == self.world_size:
            self._first("verdict", "complete")

    @property
    def ran_out(self) -> bool:
        """Return whether any rank ran out of memory."""
        return self._count("out_of_memory") > 0

    @property
    def connections_closed(self) -> bool:
        """Return whether any rank broke the process group."""
        return self._count("closed") > 0

    @property
    def failure(self) -> str | None:
        """Return which rank was the first to fail with what error that is not about memory, None if none has."""
        return self.store.get(self._key("failure")).decode() if self._count("failed") else None

    def close_connections(self) -> bool:
        """Free the ranks that wait for this one in a collective; False where the group cannot be made anew."""
        if not process_group.can_remake():
            return False
        self.store.add(self._key("closed"), 1)  # before it happens: who gets an error looks here
        process_group.close_connections()
        return True

    def wait(self, seconds: float | None, word: str = "verdict") -> bool:
        """Wait until every rank has reported, or one has given up; False if neither has happened after `seconds`.

        Args:
            word: Wait for this to be said instead.
        """
        # Not the store's own wait: torch warns of each one that ends without the key.
        start = time.monotonic()
        while not self.store.check([self._key(word)]):
            waited = time.monotonic() - start
            left = math.inf if seconds is None else seconds - waited
            if left <= 0:
                return False
            time.sleep(min(left, max(_SHORTEST_SLEEP_SECONDS, min(waited / 10, _LONGEST_SLEEP_SECONDS))))
        return True

    def conclude(self, is_complete: bool) -> None:
        """Go on together if every rank has reported, and make the process group anew if one had to break it.

        The first to come here decides for all: a rank that gives up must not be waited for. All wait for the last one,
        because a rank may close its connections while the last report comes.
        """
        if self._first("verdict", "complete" if is_complete else "given up") != "complete":
            return
        if self.store.add(self._key("settled"), 1) == self.world_size:
            self._first("all settled", "yes")
        self.wait(None, "all settled")
        if self.connections_closed:
            process_group.remake()


@overload
def find_executable_batch_size(
    function: Callable[..., R],
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
    *,
    minimum_batch_size: int = ...,
    keep_update: bool = ...,
) -> Callable[..., R]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[[], int] | None = ...,
    *,
    minimum_batch_size: int = ...,
    keep_update: bool = ...,
) -> Callable[[Callable[..., R]], Callable[..., R]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    minimum_batch_size: int = 1,
    keep_update: bool = False,
) -> Any:
    """Call a function with a batch size, and with smaller ones until memory suffices.

    The function takes the batch size first. When any rank runs out of memory, all ranks try again with the same
    smaller size; models and loaders must be prepared inside the function, because the process group may be made anew.

    Args:
        function: The function; without it a decorator is returned.
        starting_batch_size: The first size to try.
        reduce_batch_size_fn: Returns the next size; by default nine tenths of the last, or with `keep_update` the next
            smaller divisor of the first.
        minimum_batch_size: Give up below this size.
        keep_update: Accumulate over more batches as they get smaller, so that an optimizer step still sees as many
            samples as with the first size.

    Raises:
        UsageError: (a RuntimeError) if no size from the first down to the smallest fits, or on a rank that did not fail
            itself, if another one did. A rank that fails raises its own error, and the ranks can go on together.
        ConfigurationError: If the function does not take the batch size first, or was called with it.

    Example:
        ```python
        from accelerate.utils import find_executable_batch_size

        @find_executable_batch_size(starting_batch_size=64)
        def train(batch_size):
            return batch_size

        train()
        ```
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            minimum_batch_size=minimum_batch_size,
            keep_update=keep_update,
        )
    if minimum_batch_size < 1:
        raise ConfigurationError(
            f"minimum_batch_size={minimum_batch_size!r} is no size of a batch. Write 1 or more, or leave it out."
        )
    if keep_update and reduce_batch_size_fn is not None:
        raise ConfigurationError(
            "keep_update=True and a reduce_batch_size_fn were both given, but only divisors of the first size keep the "
            "update. Give one of them."
        )
    batch_size = starting_batch_size

    def smaller() -> int:
        if reduce_batch_size_fn is not None:
            return reduce_batch_size_fn()
        if keep_update:
            return next((size for size in range(batch_size - 1, 0, -1) if starting_batch_size % size == 0), 0)
        return int(batch_size * 0.9)

    @functools.wraps(function)
    def with_batch_size(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _check_call(function, args)
        clear_device_cache(garbage_collection=True)
        while True:
            if batch_size < minimum_batch_size:
                raise _no_size(starting_batch_size, minimum_batch_size)
            finished, result = _try(function, _Attempt(), batch_size, args, kwargs)
            if finished:
                return result
            previous, batch_size = batch_size, smaller()
            clear_device_cache(garbage_collection=True)
            if keep_update and batch_size:
                GradientState().grow(starting_batch_size // batch_size)
            _say_what_comes(previous, batch_size, minimum_batch_size)

    return with_batch_size


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    names = list(inspect.signature(function).parameters)
    if len(names) < len(args) + 1:
        shown = ", ".join(f"{name}={value!r}" for name, value in zip(names[1:], args[1:], strict=False))
        raise WrongCallError(
            f"{function.__name__} was called with {len(args)} positional argument(s), but its first one, the batch size, "
            f"is filled in by find_executable_batch_size. Write {function.__name__}({shown})."
        )


class WrongCallError(ConfigurationError, TypeError):
    """A decorated function was called with a batch size of its own."""


def _try(
    function: Callable[..., R], attempt: _Attempt, batch_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, R | None]:
    """Run the function once and agree with the other ranks on how it went."""
    result: R | None = None
    end, cause = _End.DONE, None
    try:
        result = function(batch_size, *args, **kwargs)
    except Exception as error:
        end = attempt.end_of(error)
        if end is _End.FAILED:
            if attempt.world_size > 1:
                attempt.report(end, error)
                _settle(attempt, end)
            raise
        traceback.clear_frames(error.__traceback__)
        cause = error if end is _End.INTERRUPTED else None
    if attempt.world_size == 1:
        return end is _End.DONE, result
    try:
        attempt.report(end)
        _settle(attempt, end)
        if attempt.failure is not None:
            raise _failed_elsewhere(attempt.failure) from cause
    finally:
        cause = None  # it holds this frame
    return (False, None) if attempt.ran_out else (True, result)


def _settle(attempt: _Attempt, end: _End) -> None:
    """Wait for the other ranks to end this try too, and free those that wait for this one in a collective."""
    if end is _End.DONE:
        attempt.conclude(attempt.wait(None))
        return
    # Once one has closed them there is nothing to save, and a third rank may wait for this one.
    is_complete = attempt.wait(0 if attempt.connections_closed else _PATIENCE_SECONDS)
    if not is_complete:
        if end is not _End.FAILED:
            gc.collect()  # for as long as the others take
        # An error is not kept back for the sake of a rank that may compute for hours, or that nothing can free.
        grace = _GRACE_SECONDS if attempt.close_connections() else 0.0
        is_complete = attempt.wait(grace if end is _End.FAILED else None)
    attempt.conclude(is_complete)


def _no_size(starting: int, minimum: int) -> UsageError:
    if starting < minimum:
        return UsageError(
            f"starting_batch_size={starting!r} and minimum_batch_size={minimum!r} leave no batch size to try. Both must be "
            "at least 1, the first not below the second."
        )
    return UsageError(
        f"No batch size from {starting} down to {minimum} fits into memory. "
        "Use a smaller model, shorter inputs or a lower minimum_batch_size."
    )


def _failed_elsewhere(failure: str) -> UsageError:
    return UsageError(
        f"Inside find_executable_batch_size {failure}. A smaller batch does not help against that, so all ranks stop. "
        "The traceback is in that rank's own output."
    )


def _say_what_comes(previous: int, batch_size: int, minimum: int) -> None:
    runtime = current.active()
    if runtime is not None and runtime.rank:
        return
    if batch_size < minimum:
        _LOG.warning("Memory ran out with batch size %d; there is no smaller one to try.", previous)
    else:
        _LOG.warning("Memory ran out with batch size %d; trying %d on all ranks.", previous, batch_size)
