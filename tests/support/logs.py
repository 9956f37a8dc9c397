"""Log records that a block must write, in the way of `pytest.warns`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def logged(match: str, *, times: int = 1) -> Iterator[list[str]]:
    """Check that the block logs so many warnings of the package that match, and give all its warnings.

    Args:
        match: A regular expression.
    """
    kept, logger = _Kept(), logging.getLogger("accelerate")
    kept.setLevel(logging.WARNING)
    logger.addHandler(kept)
    try:
        yield kept.messages
    finally:
        logger.removeHandler(kept)
    found = [message for message in kept.messages if re.search(match, message)]
    assert len(found) == times, f"{times} of {match!r} were expected in {kept.messages!r}"
