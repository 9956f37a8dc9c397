"""Loggers that speak once for all processes, or for each in turn."""

from __future__ import annotations

import functools
import logging
from collections.abc import MutableMapping
from typing import Any

from accelerate._base.errors import UsageError
from accelerate._base.lazy import attach_passing_names
from accelerate.config import env
from accelerate.runtime import current, process_control

attach_passing_names(__name__)


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls take `main_process_only` (default True) and `in_order` (default False).

    Args:
        logger: The logger to speak through.
        extra: Context that is added to every record.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the main process; on all with `main_process_only=False`; one rank after another with `in_order=True`.

        Raises:
            UsageError: If this process was not started, so that its rank is not known.
        """
        runtime = current.active()
        if runtime is None:
            raise UsageError(
                f"The logger {self.logger.name!r} was used before this process knows its rank. "
                "Make an Accelerator() or a PartialState() first."
            )
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)
        if in_order:
            # Every rank takes part in every turn, also those whose level hides the message: a rank that left
            # the round early would leave the others waiting.
            for turn in range(runtime.world_size):
                if turn == runtime.rank and self.isEnabledFor(level):
                    self._emit(level, msg, args, kwargs)
                process_control.barrier()
        elif self.isEnabledFor(level) and (not main_process_only or runtime.rank == current.main_rank()):
            self._emit(level, msg, args, kwargs)

    def _emit(self, level: int, msg: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        text, options = self.process(msg, dict(kwargs))
        options["stacklevel"] = options.get("stacklevel", 2) + 1
        self.logger.log(level, text, *args, **options)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank before the message."""
        runtime = current.active()
        rank = runtime.rank if runtime is not None else 0
        return super().process(f"[RANK {rank}] {msg}", kwargs)

    @functools.lru_cache(None)  # noqa: B019 - loggers live as long as the program
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, but only the first time for the same arguments."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 2) + 1  # the caller's line, not this one
        self.log(logging.WARNING, *args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that knows about ranks.

    Args:
        name: Name of the logger, usually `__name__`.
        log_level: Level of the logger and of the root logger; ACCELERATE_LOG_LEVEL if None.

    Example:
        ```python
        from accelerate import Accelerator
        from accelerate.logging import get_logger

        accelerator = Accelerator()
        logger = get_logger(__name__, log_level="INFO")
        logger.info("once")
        logger.info("from every process", main_process_only=False)
        logger.info("from every process in turn", main_process_only=False, in_order=True)
        ```
    """
    logger = logging.getLogger(name)
    level = log_level if log_level is not None else env.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})
