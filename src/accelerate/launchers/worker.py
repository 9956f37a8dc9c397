"""What a process runs that was started for a function."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PicklingError
from typing import Any

import torch

from accelerate._base.errors import WrongTypeError
from accelerate.config import env
from accelerate.config.env import patch_environment
from accelerate.runtime import current


def checked_arguments(args: object) -> tuple[Any, ...]:
    """Return the arguments that a launcher was given for its function.

    Raises:
        WrongTypeError: They are not several values in an order.
    """
    # Text is a sequence of letters, which nobody means.
    if not isinstance(args, Iterable) or isinstance(args, (str, bytes, Mapping, AbstractSet)):
        raise WrongTypeError(
            f"args={args!r} is of the type {type(args).__name__}, but the function is called with the values of a "
            "sequence. Write args=(value,) for one value."
        )
    return tuple(args)


class Worker:
    """A function with its arguments, to be called in another process.

    Args:
        variables: Environment variables of every process.
        forked: Whether the process is a copy of this one, with its state.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], variables: dict[str, str], *, forked: bool = True
    ) -> None:
        self.function = function
        self.args = args
        self.variables = variables
        self.forked = forked
        # The elastic agent names what it starts by these.
        self.__name__ = self.__qualname__ = str(getattr(function, "__qualname__", type(function).__name__))

    def __call__(self, rank: int | None = None) -> Any:
        """Call the function, as the process with this rank if the variables do not say who it is."""
        current.reset()
        if self.forked:
            # A forked process must not enter a parallel region: the threads of its parent's pool were not forked.
            torch.set_num_threads(1)
        ranks = {} if rank is None else {"rank": str(rank), "local_rank": str(rank)}
        with patch_environment(**self.variables, **ranks):
            return self.function(*self.args)


PID_FILE = "pid"
"""Beside the record of a failure, which does not say whose it is."""


class ReturningWorker(Worker):
    """A worker whose result is sent back; one that cannot be sent is dropped with a warning."""

    def __call__(self, rank: int | None = None) -> Any:
        """Call the function and return its result if it can leave the process."""
        record = env.get("TORCHELASTIC_ERROR_FILE")
        if record is not None:
            Path(record).with_name(PID_FILE).write_text(str(os.getpid()))
        result = super().__call__(rank)
        try:
            ForkingPickler.dumps(result)
        except (PicklingError, TypeError, AttributeError, RuntimeError) as error:
            warnings.warn(
                f"What {self.__qualname__} returned, a {type(result).__name__}, cannot leave its process: {error}. "
                "None takes its place. Return numbers, tensors on the CPU or a state dictionary.",
                stacklevel=1,
            )
            return None
        return result
