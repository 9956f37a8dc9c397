"""What files of others say, taken with care: names that stay in their folder, JSON, numbers, and files that have an end."""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from accelerate._base.errors import ConfigurationError, printable

MOST_BYTES = 100_000_000
"""The longest text that is read as a whole: what the safetensors format allows a header, and more than any index has."""
_MOST_SHOWN = 200
_LARGEST = 2**63 - 1
UNPICKLER_MARK = "WeightsUnpickler error: "
"""The text with which torch begins to quote a pickle."""
_LINES = "\n\t"
_MOST_AXES = 64
MOST_LEVELS = 100
_MOST_OF_A_NAME = 255
# What ssh takes for no option, and a shell for no more than a word; a percent sign begins the zone of an IPv6 address.
_HOST = re.compile(r"[\w.:][\w.:-]*(?:%[\w.-]+)?")
_USER = re.compile(r"[\w.][\w.-]*")
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 2 * _MOST_SHOWN


def path_inside(folder: Path, name: object, origin: str) -> Path:
    """Return the path of a file that another file names, if the name stays in a folder.

    Only its text counts, as every system reads it: links on the disk are the user's own. The cache of the Hub is made of
    links that lead out of their folders.

    Args:
        origin: What names it, for the message: "The index 'x.json'".

    Raises:
        ConfigurationError: If it is no name, or one that leads out of the folder.
    """
    why = _why_outside(name)
    if why is not None:
        raise ConfigurationError(
            f"{origin} names the file {shown(name)}, which {why}. What a file names must lie in {str(folder)!r}: get it "
            "again from where you trust it, or correct the name in it."
        )
    return folder / str(name)


def _why_outside(name: object) -> str | None:
    if not isinstance(name, str) or not PurePosixPath(name).parts:
        return "is no name of a file"
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    if posix.is_absolute() or windows.drive or windows.root:
        return "begins at the root of a disk"
    if ".." in (*posix.parts, *windows.parts):
        return "leads out of the folder"
    return None if can_be_path(name) else "holds a character that no name has"


def can_be_path(text: str) -> bool:
    """Return whether the system can have a file of this name."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def is_utf8(path: Path) -> bool:
    """Return whether the bytes of a path are UTF-8, as packages in C++ and Rust expect; Linux allows any bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_host(text: str, *, with_user: bool = False) -> bool:
    """Return whether a text can be the name or the address of a machine, so that it can stand in commands.

    Args:
        with_user: `user@` may stand before it.
    """
    user, at, host = text.rpartition("@")
    if at and not (with_user and _USER.fullmatch(user)):
        return False
    return len(text) <= _MOST_OF_A_NAME and _HOST.fullmatch(host) is not None


def check_regular(path: Path) -> os.stat_result:
    """Return the status of a file that has an end: a pipe would be waited for, and a device may be read for ever.

    Raises:
        ConfigurationError: If it is something else.
        OSError: If there is none.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise ConfigurationError(f"{str(path)!r} is {kind}, and a file is expected there. Give the path of a file.")
    return status


def read_limited(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return what a file holds.

    Args:
        most: How many bytes it may have.

    Raises:
        ConfigurationError: If it is longer, or no file.
        OSError: If it cannot be read.
    """
    size = check_regular(path).st_size
    if size > most:
        raise ConfigurationError(
            f"{str(path)!r} has {size} bytes, and a text of up to {most} is expected there. Save or download it again, or "
            "give another file."
        )
    return path.read_bytes()


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text.

    Args:
        pairs: Makes each object from its names and values.

    Raises:
        ValueError: If it is no JSON, or so nested or with so long a number that Python does not read it.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (ConfigurationError, json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError("a number in it has too many digits") from error


def check_nesting(value: Any) -> None:
    """Refuse a value with so many lists and dictionaries in each other that functions which call themselves give up.

    Raises:
        ValueError: If it is nested too deeply.
    """
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [entry for group in level for entry in _entries(group)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _entries(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def is_whole(value: object, least: int = 0, most: int = _LARGEST) -> bool:
    """Return whether a value of a file is a whole number in a range; true and false are none."""
    return type(value) is int and least <= value <= most


def number_in(text: str, most: int = 10**9) -> int | None:
    """Return the number that a text of digits stands for; None for another text, or for more than there can be."""
    text = text.lstrip("0") or text[:1]
    if not text.isdecimal() or len(text) > len(str(most)):  # Python itself refuses to read some thousand digits
        return None
    number = int(text)
    return number if number <= most else None


def is_shape(value: object) -> bool:
    """Return whether a value of a file is the shape of a tensor that a machine can address."""
    if not isinstance(value, list) or len(value) > _MOST_AXES or not all(map(is_whole, value)):
        return False
    # Without the zeros: the other sizes of an empty tensor are multiplied too.
    return math.prod(size or 1 for size in value) <= _LARGEST


def shown(value: object) -> str:
    """Return a value as a message shows it: not longer than a reader likes, whatever it is."""
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):  # a number of too many digits, or lists in lists in lists
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


@contextmanager
def escaping_errors() -> Iterator[None]:
    """Escape what torch's readers quote from a file in their errors, which a traceback shows as it is."""
    try:
        yield
    except Exception as caught:
        error: BaseException | None = caught
        while error is not None:
            error.args = tuple(_escaped(entry) if isinstance(entry, str) else entry for entry in error.args)
            error = error.__cause__ or error.__context__
        raise


def _escaped(text: str) -> str:
    # Names that are quoted behind the mark may hold line breaks; what comes before it is torch's own text.
    before, mark, quoted = text.rpartition(UNPICKLER_MARK)
    return f"{printable(before, keep=_LINES)}{mark}{printable(quoted.strip(), keep='' if mark else _LINES)}"


def first_line(error: BaseException) -> str:
    """Return what an error says, for a message of our own."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
