"""Questions about where a value of the configuration came from."""

from __future__ import annotations

from accelerate.config.run_config import OptionSource, RunConfig


def is_typed(config: RunConfig, key: str) -> bool:
    """Say whether the value was typed on the command line of this run."""
    return config.resolved(key).origin.source is OptionSource.FLAG


def is_default(config: RunConfig, key: str) -> bool:
    """Say whether nobody chose the value and nothing was found out about it."""
    return config.resolved(key).origin.source is OptionSource.DEFAULT
