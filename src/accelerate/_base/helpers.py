"""Small helpers of every room: a decision with its reason, warnings shown once, the user's line, sizes as text."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_UNITS = ("bytes", "KB", "MB", "GB", "TB")
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
_OLDEST_KERNEL = "5.5.0"
_shown_warnings: set[str] = set()


@dataclass(frozen=True)
class Choice(Generic[T]):
    """Hold what was decided and why, so that the decision can be logged and tested."""

    value: T
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"


def warn_once(message: str, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """Warn with `message`, unless this process already did.

    Args:
        stacklevel: As in `warnings.warn`, counted from the caller: 2 names the line that called the caller.
    """
    if message in _shown_warnings:
        return
    _shown_warnings.add(message)
    warnings.warn(message, category, stacklevel=stacklevel + 1)


def log_once(logger: str, message: str) -> None:
    """Log `message` as a warning of the logger of this name, unless this process already did.

    For what programs may do on purpose: unlike a warning of Python's, it stops nobody who turns warnings into errors.
    """
    if message not in _shown_warnings:
        _shown_warnings.add(message)
        logging.getLogger(logger).warning("%s", message)


def reset_warnings() -> None:
    """Forget which warnings were shown, so that each may show again."""
    _shown_warnings.clear()


def convert_bytes(size: float) -> str:
    """Write a number of bytes in the largest fitting unit: `convert_bytes(2048) == "2.0 KB"`."""
    for unit in _UNITS:
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: object) -> str:
    """Return the name of a function or class, or that of an object's class."""
    owner = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or owner)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the entries of `source` into `destination`, at every depth, and return it."""
    for key, value in source.items():
        if isinstance(value, dict):
            inner = destination.setdefault(key, {})
            destination[key] = merge_dicts(value, inner if isinstance(inner, dict) else {})
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: object, attr: str) -> Any:
    """Return an attribute by its dotted path: `recursive_getattr(model, "encoder.layer.weight")`."""
    return reduce(getattr, attr.split("."), obj)


def check_os_kernel() -> None:
    """Log a warning on a Linux kernel so old that processes are known to hang on it."""
    import platform

    from packaging.version import InvalidVersion, parse

    if platform.system() != "Linux":
        return
    release = platform.release().partition("-")[0].partition("+")[0]
    try:
        old = parse(release) < parse(_OLDEST_KERNEL)
    except InvalidVersion:  # a vendor's own naming; nothing is known of it
        return
    if old:
        log_once(
            __name__,
            f"This machine runs Linux kernel {release}; before {_OLDEST_KERNEL} processes may hang. "
            "Update the kernel if yours do.",
        )


def user_line() -> str:
    """Return `file:line` of the innermost call that is not inside this package."""
    frame = sys._getframe(user_stacklevel() - 1)  # a stack level counts from 1, a frame from 0
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def user_stacklevel() -> int:
    """Return the `stacklevel` with which a warning by the caller of this names the user's line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
        frame, level = frame.f_back, level + 1
    return level
