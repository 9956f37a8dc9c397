"""A progress bar that many processes show once."""

from __future__ import annotations

from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate._base.lazy import attach_passing_names

attach_passing_names(__name__)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Make a tqdm bar (in a notebook, its notebook form) that only the first process of a machine shows.

    Args:
        main_process_only: Show it on the first process of each machine alone.

    The other arguments are those of `tqdm.auto.tqdm`.

    Raises:
        ConfigurationError: The first argument is a bool, as in releases where `main_process_only` came first.
        MissingPackageError: tqdm is not installed.

    Example:
        >>> for batch in tqdm(loader, desc="epoch 1"):
        ...     train(batch)
    """
    bars = require("tqdm.auto", why="A progress bar")
    if args and isinstance(args[0], bool):
        raise ConfigurationError(
            f"tqdm({args[0]!r}, ...) got a bool where the iterable belongs. "
            f"Write it by name: tqdm(iterable, main_process_only={args[0]!r})."
        )
    if main_process_only and not kwargs.get("disable", False):
        from accelerate.runtime import current

        runtime, main = current.runtime(), current.main_rank()
        kwargs["disable"] = runtime.rank != main if main else runtime.local_rank != 0
    return bars.tqdm(*args, **kwargs)
