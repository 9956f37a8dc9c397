"""Warnings that a process shows once, however often their cause is met."""

from __future__ import annotations

import warnings

_seen: set[str] = set()


def warn_once(message: str, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """Warn with `message`, unless this process already did.

    Args:
        stacklevel: As in `warnings.warn`, counted from the caller: 2 names the line that called the caller.
    """
    if message in _seen:
        return
    _seen.add(message)
    warnings.warn(message, category, stacklevel=stacklevel + 1)


def reset() -> None:
    """Forget what was shown, so that every message may show again."""
    _seen.clear()
