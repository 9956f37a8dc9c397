"""Checked mode: before a collective, the ranks compare what each of them is about to exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from accelerate._base.errors import DistributedOperationException
from accelerate._base.helpers import user_line
from accelerate.collectives.base import communicator
from accelerate.collectives.nested import leaves
from accelerate.runtime import current

F = TypeVar("F", bound=Callable[..., Any])


class Call(NamedTuple):
    """What one rank is about to do: the operation, the user's line, and for each tensor its path and facts."""

    operation: str
    line: str
    tensors: dict[str, dict[str, str]]


def verify(operation: str, data: Any = None, *, facts: tuple[str, ...] = ("shape", "dtype", "device type")) -> None:
    """Compare the operation and the tensors of `data` between the ranks; every rank calls this.

    Args:
        facts: what of each tensor must agree.

    Raises:
        DistributedOperationException: on every rank, when they differ.
    """
    tensors = {path: _facts(leaf, facts) for path, leaf in leaves(data) if isinstance(leaf, torch.Tensor)}
    calls = communicator().gather_object(Call(operation, user_line(), tensors))
    found = _difference([Call(*call) for call in calls])
    if found:
        where = "; ".join(f"rank {rank}: {call[1]}" for rank, call in enumerate(calls))
        raise DistributedOperationException(
            f"{operation} was called with values that do not fit together: {found}. Run like this it would hang or "
            f"give wrong values. Called at {where}. Let every rank make the same call with equal shapes; "
            "`pad_across_processes` makes shapes equal, `gather_object` takes any."
        )


def verify_operation(function: F) -> F:
    """Check, in checked mode, that all ranks call `function(tensor, ...)` with tensors that fit together."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        runtime = current.runtime()
        if runtime.checked and runtime.is_distributed:
            verify(function.__name__, args[0] if args else kwargs.get("tensor"))
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]


def chained_operation(function: F) -> F:
    """Name `function` in an error of the checked mode that comes from a collective inside it."""

    @functools.wraps(function)
    def chained(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            raise DistributedOperationException(f"while {function.__name__} was running: {error}") from error

    return chained  # type: ignore[return-value]


def _facts(tensor: torch.Tensor, wanted: tuple[str, ...]) -> dict[str, str]:
    known = {
        "shape": str(tuple(tensor.shape)),
        "dtype": str(tensor.dtype),
        "device type": tensor.device.type,
        "number of dimensions": str(tensor.dim()),
    }
    return {name: known[name] for name in wanted}


def _difference(calls: list[Call]) -> str | None:
    """Say the first thing in which the calls differ."""
    if len({call.operation for call in calls}) > 1:
        return f"the operation differs: {_per_rank([call.operation for call in calls])}"
    if len({tuple(call.tensors) for call in calls}) > 1:
        return f"the tensors differ: {_per_rank([str(list(call.tensors)) for call in calls])}"
    for path, facts in calls[0].tensors.items():
        for fact in facts:
            values = [call.tensors[path][fact] for call in calls]
            if len(set(values)) > 1:
                return f"the {fact} of {'the entry ' + path if path else 'the tensor'} differs: {_per_rank(values)}"
    return None


def _per_rank(values: list[str]) -> str:
    return ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(values))
