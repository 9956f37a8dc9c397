"""Retry a function with smaller batches when memory runs out, on all ranks alike."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch._C._distributed_c10d import Store

from .._base.errors import ConfigurationError, UsageError
from ..runtime import current, process_group
from ..runtime.gradient_clock import GradientState
from ..runtime.memory import clear_device_cache, should_reduce_batch_size

R = TypeVar("R")
_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 2.0
_ENDS = ("done", "out_of_memory", "interrupted")
"""How a try may end on a rank so that all can go on."""


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
    def store(self) -> Store | None:
        """Return the store where the ranks met, None for a single process."""
        if self.world_size == 1:
            return None
        if self._store is None:
            self._store = process_group.store()
        return self._store

    def _key(self, word: str) -> str:
        if self._number is None:
            self._number = current.next_number("batch size attempt")
        return f"accelerate/batch_size/{self._number}/{word}"

    def _count(self, word: str) -> int:
        return int(self.store.add(self._key(word), 0)) if self.store is not None else 0

    def report(self, word: str) -> None:
        """Tell the other ranks how this try ended here."""
        if self.store is not None:
            self.store.add(self._key(word), 1)

    @property
    def ran_out(self) -> bool:
        """Return whether any rank ran out of memory."""
        return self._count("out_of_memory") > 0

    @property
    def failure(self) -> str | None:
        """Return which rank failed with what error that is not about memory, None if none has."""
        return self.store.get(self._key("failure")).decode() if self.store and self._count("failed") else None

    def report_failure(self, error: Exception) -> None:
        """Tell the other ranks of an error that is not about memory."""
        if self.store is not None:
            text = f"rank {current.runtime().rank} failed with {type(error).__name__}: {error}"
            self.store.set(self._key("failure"), text)
            self.report("failed")

    def settle(self, seconds: float | None) -> bool:
        """Wait until every rank has reported, or a rank has failed; False if some have not after `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while sum(map(self._count, _ENDS)) < self.world_size:
            if self.failure is not None:
                raise _failed_elsewhere(self.failure)
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


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
        UsageError: If no size from the first down to the smallest fits.
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
    if minimum_batch_size < 1 or starting_batch_size < minimum_batch_size:
        raise ConfigurationError(
            f"starting_batch_size={starting_batch_size!r} and minimum_batch_size={minimum_batch_size!r} leave no size to "
            "try. Both must be at least 1, the first not below the second."
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
                raise UsageError(
                    f"No batch size from {starting_batch_size} down to {minimum_batch_size} fits into memory. "
                    "Use a smaller model, shorter inputs or a lower minimum_batch_size."
                )
            finished, result = _try(function, _Attempt(), batch_size, args, kwargs)
            if finished:
                return result
            previous, batch_size = batch_size, smaller()
            clear_device_cache(garbage_collection=True)
            if keep_update and batch_size:
                GradientState().grow(starting_batch_size // batch_size)
            _LOG.warning("Memory ran out with batch size %d; trying %d on all ranks.", previous, batch_size)

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
    broken = False
    try:
        result = function(batch_size, *args, **kwargs)
        attempt.report("done")
    except Exception as error:
        if should_reduce_batch_size(error):
            attempt.report("out_of_memory")
        elif attempt.ran_out:
            attempt.report("interrupted")  # this rank's collective broke because another rank ran out of memory
        elif attempt.failure is not None:
            raise _failed_elsewhere(attempt.failure) from error  # it broke because another rank failed
        else:
            attempt.report_failure(error)
            process_group.hang_up()  # the others may wait for this rank in a collective
            raise
        broken = True
        traceback.clear_frames(error.__traceback__)
    if attempt.world_size == 1:
        return not broken, result
    if broken:
        gc.collect()
        if not attempt.settle(_PATIENCE_SECONDS) and process_group.can_remake():
            process_group.hang_up()
            attempt.report("hung_up")
    attempt.settle(None)
    if not attempt.ran_out:
        return True, result
    _meet_again(attempt)
    return False, None


def _failed_elsewhere(failure: str) -> UsageError:
    return UsageError(
        f"Inside find_executable_batch_size {failure}. A smaller batch does not help against that, so all ranks stop. "
        "The traceback is in that rank's own output."
    )


def _meet_again(attempt: _Attempt) -> None:
    """Make the process group anew if a rank had to break it."""
    attempt.report("settled")
    while attempt._count("settled") < attempt.world_size:
        time.sleep(_POLL_SECONDS)
    if attempt._count("hung_up"):
        process_group.remake()
