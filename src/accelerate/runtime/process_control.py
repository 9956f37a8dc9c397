"""Run code on some processes only, one after another, on a share of the inputs, or under a debugger or profiler."""

from __future__ import annotations

import functools
import pdb  # noqa: T100 - a debugger is what this module offers
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from accelerate._base.constants import PROFILE_PATTERN_NAME
from accelerate._base.errors import ConfigurationError
from accelerate.config.plugins.training import ProfileKwargs
from accelerate.runtime import current, process_group

_DEBUGGER_POLL_SECONDS = 0.05


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and return None: stands in for a function that this process shall not run."""
    return


def barrier() -> None:
    """Wait until every process of the run is here."""
    runtime = current.runtime()
    if runtime.is_distributed:
        # A group that does not reach the device, such as gloo for most, meets on the CPU.
        meets_on_device = runtime.device.type in process_group.reachable_devices()
        dist.barrier(device_ids=runtime.backend.barrier_device_ids(runtime.device) if meets_on_device else None)


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


def run_only_if(condition: Callable[[], bool], function: Callable[..., Any] | None = None) -> Any:
    """Restrict a function to processes for which `condition` holds at the time of the call; a decorator without one."""
    if function is None:
        return functools.partial(run_only_if, condition)

    @functools.wraps(function)
    def restricted(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return restricted


@contextmanager
def profile(options: ProfileKwargs) -> Iterator[Any]:
    """Profile the block with torch's profiler, then write this rank's trace where the options say, all ranks together."""
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is not None:
        folder = Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / PROFILE_PATTERN_NAME.format(suffix=current.runtime().rank)))
        barrier()


def share_bounds(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where the share of `rank` begins and ends; the first `length % world_size` ranks get one more."""
    size, extra = divmod(length, world_size)
    begin = rank * size + min(rank, extra)
    return begin, begin + size + (rank < extra)


def split_between(inputs: Any, rank: int, world_size: int, *, apply_padding: bool = False) -> Any:
    """Return this rank's contiguous slice of `inputs`.

    Lists, tuples, tensors and a `datasets.Dataset` are split, and mappings value by value. Anything else, such as a
    string or a NumPy array, is returned unchanged. With `apply_padding` the last element of a shorter slice is repeated,
    so that all slices have the same length.
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
    if _is_dataset(inputs):
        if missing or begin == end:
            return inputs.select([*range(begin, end), *[length - 1] * missing])
        return inputs.select(range(begin, end))  # stays a slice of the table; a list becomes a table of indices
    rows, last = inputs[begin:end], inputs[-1:]
    if not missing:
        return rows
    if isinstance(inputs, torch.Tensor):
        return torch.cat([rows, *[last] * missing])
    return rows + last * missing


def _is_dataset(inputs: Any) -> bool:
    return hasattr(inputs, "select") and hasattr(inputs, "features")


def _can_be_cut(inputs: Any) -> bool:
    if isinstance(inputs, torch.Tensor):
        return inputs.dim() > 0
    return isinstance(inputs, list | tuple) or _is_dataset(inputs)


def _split_mapping(inputs: Mapping[Any, Any], rank: int, world_size: int, apply_padding: bool) -> dict[Any, Any]:
    lengths = {key: len(value) for key, value in inputs.items() if _can_be_cut(value)}
    if len(set(lengths.values())) > 1:
        raise ConfigurationError(
            f"The values of the mapping have lengths {lengths!r}: they are cut together, so they must be equal. "
            "Split them one by one, or bring them to one length."
        )
    return {key: split_between(value, rank, world_size, apply_padding=apply_padding) for key, value in inputs.items()}


class _DebuggerPrompt(pdb.Pdb):
    """A debugger that tells when its first prompt was left."""

    def __init__(self, left: Callable[[], None]) -> None:
        super().__init__()
        self._left: Callable[[], None] | None = left

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        """Talk to the user, then tell it the first time."""
        super().interaction(*args, **kwargs)
        if self._left is not None:
            self._left()
            self._left = None


def open_debugger(frame: FrameType, rank: int) -> None:
    """Open the debugger in `frame` on one rank, and keep the others waiting until it goes on.

    They wait at the store where the ranks met: a collective would run into its time limit.

    Raises:
        ConfigurationError: If there is no such rank.
    """
    runtime = current.runtime()
    if not 0 <= rank < runtime.world_size:
        raise ConfigurationError(
            f"breakpoint(rank={rank!r}) was called in a run of {runtime.world_size} process(es), so all would wait for "
            f"a debugger that nobody opens. Write a rank from 0 to {runtime.world_size - 1}."
        )
    if not runtime.is_distributed:
        pdb.Pdb().set_trace(frame)
        return
    store = process_group.store()
    key = f"accelerate/breakpoint/{current.next_number('breakpoint')}"
    if runtime.rank == rank:
        _DebuggerPrompt(lambda: store.set(key, "left")).set_trace(frame)
        return
    while not store.check([key]):
        time.sleep(_DEBUGGER_POLL_SECONDS)
