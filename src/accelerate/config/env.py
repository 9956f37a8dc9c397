"""The one door to the environment variables of the process."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from accelerate._base.errors import ConfigurationError

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})
_PREFIX = "ACCELERATE_"


@overload
def get(name: str) -> str | None: ...
@overload
def get(name: str, default: str) -> str: ...
@overload
def get(name: str, default: str | None) -> str | None: ...
def get(name: str, default: str | None = None) -> str | None:
    """Return a variable, or `default` where it is not set."""
    return os.environ.get(name, default)


def flag(name: str, default: bool = False) -> bool:
    """Return a variable as a yes or no, or `default` where it is not set or empty.

    Raises:
        ConfigurationError: The variable holds another word.
    """
    value = os.environ.get(name)
    if not value:
        return default
    try:
        return str_to_bool(value, to_bool=True)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The environment variable {name}={value!r} is neither yes nor no. Set it to `true` or `false`."
        ) from error


def integer(names: str | Sequence[str], default: int) -> int:
    """Return the first of the variables that holds a number of at least zero, or `default`.

    Raises:
        ConfigurationError: A variable is set to something that is not a whole number.
    """
    for name in (names,) if isinstance(names, str) else names:
        value = os.environ.get(name)
        if not value:
            continue
        try:
            number = int(value)
        except ValueError as error:
            raise ConfigurationError(
                f"The environment variable {name}={value!r} is not a whole number. Set it to one, or unset it."
            ) from error
        if number >= 0:
            return number
    return default


def put(name: str, value: object) -> None:
    """Set a variable to the text of `value`."""
    os.environ[name] = str(value)


def drop(name: str) -> None:
    """Remove a variable, if it is set."""
    os.environ.pop(name, None)


def items() -> dict[str, str]:
    """Return a copy of all variables."""
    return dict(os.environ)


def update(values: Mapping[str, str | None]) -> None:
    """Set many variables; None removes one."""
    for name, value in values.items():
        if value is None:
            drop(name)
        else:
            put(name, value)


def _restore(saved: Mapping[str, str], names: Callable[[str], bool]) -> None:
    """Bring the variables that `names` accepts back to what `saved` holds of them."""
    for name in [name for name in os.environ if names(name) and name not in saved]:
        del os.environ[name]
    os.environ.update({name: value for name, value in saved.items() if names(name)})


@overload
def str_to_bool(value: str, to_bool: Literal[True]) -> bool: ...
@overload
def str_to_bool(value: str, to_bool: bool = False) -> int: ...
def str_to_bool(value: str, to_bool: bool = False) -> int:
    """Read a word for yes or no (y, yes, t, true, on, 1; n, no, f, false, off, 0, in any case).

    Args:
        to_bool: Return a bool instead of 1 or 0.

    Raises:
        ConfigurationError: It is another word.
    """
    word = value.strip().lower()
    if word not in _TRUE and word not in _FALSE:
        raise ConfigurationError(
            f"{value!r} is neither yes nor no. Write one of y, yes, t, true, on, 1 or n, no, f, false, off, 0."
        )
    return word in _TRUE if to_bool else int(word in _TRUE)


def get_int_from_env(env_keys: Sequence[str], default: int) -> int:
    """Return the first of `env_keys` whose value is a number of at least zero, or `default`."""
    return integer(env_keys, default)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a variable as a yes or no, or `default` where it is not set."""
    return flag(key, default)


def parse_choice_from_env(key: str, default: object = "no") -> str:
    """Return a variable as text, or the text of `default` where it is not set."""
    return get(key, str(default))


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return those of the names that this process has already imported."""
    return [name for name in library_names if name in sys.modules]


@contextlib.contextmanager
def patch_environment(**kwargs: object) -> Iterator[None]:
    """Set variables (names in upper case) inside a block and bring the old ones back after it.

    Example:
        >>> with patch_environment(accelerate_mixed_precision="bf16"):
        ...     train()
    """
    wanted = {name.upper(): str(value) for name, value in kwargs.items()}
    saved = {name: os.environ[name] for name in wanted if name in os.environ}
    os.environ.update(wanted)
    try:
        yield
    finally:
        _restore(saved, wanted.__contains__)


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Empty the environment inside a block and bring it back after it."""
    saved = items()
    os.environ.clear()
    try:
        yield
    finally:
        _restore(saved, lambda name: True)


@contextlib.contextmanager
def keep_accelerate_environment() -> Iterator[None]:
    """Bring the ACCELERATE_* variables back after a block to what they were before it."""
    saved = items()
    try:
        yield
    finally:
        _restore(saved, lambda name: name.startswith(_PREFIX))


@contextlib.contextmanager
def without_accelerate_environment() -> Iterator[None]:
    """Hide the ACCELERATE_* variables inside a block."""
    with keep_accelerate_environment():
        for name in [name for name in os.environ if name.startswith(_PREFIX)]:
            del os.environ[name]
        yield


def purge_accelerate_environment(func_or_cls: F) -> F:
    """Decorate a function, or a class of tests, to leave no ACCELERATE_* variable changed.

    A class gets every method wrapped whose name starts with `test`, also in its sub-classes.
    """
    if isinstance(func_or_cls, type):
        _purge_class(func_or_cls)
        return func_or_cls
    return _purge_function(func_or_cls)


def _purge_function(function: F) -> F:
    from inspect import iscoroutinefunction  # here, because that module is slow to load and rarely needed

    if iscoroutinefunction(function):

        @functools.wraps(function)
        async def waiting(*args: Any, **kwargs: Any) -> Any:
            with keep_accelerate_environment():
                return await function(*args, **kwargs)

        return waiting  # type: ignore[return-value]

    return keep_accelerate_environment()(function)


def _purge_methods(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if not name.startswith("test"):
            continue
        if isinstance(member, (staticmethod, classmethod)):
            setattr(cls, name, type(member)(_purge_function(member.__func__)))
        elif callable(member):
            setattr(cls, name, _purge_function(member))


def _purge_class(cls: type) -> None:
    _purge_methods(cls)
    own = vars(cls).get("__init_subclass__")

    def init_subclass(subclass: Any, /, **kwargs: Any) -> None:
        if own is not None:
            own.__func__(subclass, **kwargs)
        else:
            parent: Any = super(cls, subclass)
            parent.__init_subclass__(**kwargs)
        _purge_methods(subclass)

    setattr(cls, "__init_subclass__", classmethod(init_subclass))  # noqa: B010 - mypy refuses the plain assignment


def convert_dict_to_env_variables(current_env: Mapping[str, object]) -> list[str]:
    """Return one `NAME=value` line for each variable, leaving out, with a warning, those that a shell could misread."""
    unsafe = (";", "\n", "<", ">", " ")
    lines = []
    for name, value in current_env.items():
        text = str(value)
        if name and text and not any(mark in name or mark in text for mark in unsafe):
            lines.append(f"{name}={text}\n")
        else:
            logger.warning(  # without its value, which may be a secret
                "The variable %r is left out: it is empty, or it holds a space or one of ; < > or a line break, which a "
                "shell could misread. Set it in the shell itself.",
                name,
            )
    return lines
