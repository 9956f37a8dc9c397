"""Run code on some processes only, one after another, or on a share of the inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from accelerate._base.errors import ConfigurationError
from accelerate.runtime import current

P = ParamSpec("P")
R = TypeVar("R")


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and return None: stands in for a function that this process shall not run."""
    return


def barrier() -> None:
    """Wait until every process of the run is here."""
    runtime = current.runtime()
    if runtime.is_distributed:
        dist.barrier(device_ids=runtime.backend.barrier_device_ids(runtime.device))


@contextmanager
def one_goes_first(first: bool) -> Iterator[None]:
    """Let the process for which `first` is true run the block before all others enter it."""
    if not first:
        barrier()
    try:
        yield
    finally:
        # Also after an exception: the others must not wait for a process that has failed.
        if first:
            barrier()


def only_if(condition: Callable[[], bool], function: Callable[P, R]) -> Callable[P, R | None]:
    """Return `function` restricted to processes for which `condition` holds at the time of the call."""

    @functools.wraps(function)
    def restricted(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if condition() else None

    return restricted


def share_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where the share of `rank` begins and ends; the first `length % world_size` ranks get one more."""
    size, extra = divmod(length, world_size)
    begin = rank * size + min(rank, extra)
    return begin, begin + size + (rank < extra)


def split_between(inputs: Any, rank: int, world_size: int, *, apply_padding: bool = False) -> Any:
    """Return this rank's contiguous share of `inputs`.

    Lists, tuples, strings, tensors, arrays and anything else that can be sliced is cut; a mapping is cut value by
    value into a new one; a `datasets.Dataset` by its `select`; what has no length is returned whole. With
    `apply_padding` the last element of a shorter share is repeated, so that all shares have one length.
    """
    if world_size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        return _split_mapping(inputs, rank, world_size, apply_padding)
    if not _can_be_cut(inputs):
        return inputs
    length = len(inputs)
    begin, end = share_bounds(length, rank, world_size)
    missing = -(-length // world_size) - (end - begin) if apply_padding and length else 0
    if hasattr(inputs, "select") and hasattr(inputs, "features"):
        if missing or begin == end:
            return inputs.select([*range(begin, end), *[length - 1] * missing])
        return inputs.select(range(begin, end))  # stays a slice of the table; a list becomes a table of indices
    share = inputs[begin:end]
    return _repeat_last(share, inputs, missing) if missing else share


def _can_be_cut(inputs: Any) -> bool:
    if isinstance(inputs, torch.Tensor):
        return inputs.dim() > 0
    return hasattr(inputs, "__len__") and hasattr(inputs, "__getitem__")


def _split_mapping(inputs: Mapping[Any, Any], rank: int, world_size: int, apply_padding: bool) -> dict[Any, Any]:
    lengths = {key: len(value) for key, value in inputs.items() if _can_be_cut(value)}
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(
            f"The values of the mapping have lengths {lengths!r}: they are cut together, so they must be equal. "
            "Split them one by one, or bring them to one length."
        )
    return {key: split_between(value, rank, world_size, apply_padding=apply_padding) for key, value in inputs.items()}


def _repeat_last(share: Any, inputs: Any, missing: int) -> Any:
    last = inputs[-1:]
    if isinstance(inputs, torch.Tensor):
        return torch.cat([share, *[last.to(share.device)] * missing])
    if isinstance(inputs, range):
        return [*share, *list(last) * missing]
    if isinstance(inputs, Sequence):
        return share + last * missing
    import numpy

    return numpy.concatenate([share, *[last] * missing])
