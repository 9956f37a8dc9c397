"""The declaration of one option: its meaning, and how its text in variables, flags and files is read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from accelerate._base.errors import ConfigurationError
from accelerate.config import env as environment

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

KEY = "knob"


@dataclass(frozen=True)
class Codec(Generic[T]):
    """Read a value from text and write it back: `parse(format(value)) == value`.

    Args:
        meaning: What a right text is, for messages: "a whole number".
    """

    parse: Callable[[str], T]
    format: Callable[[T], str]
    meaning: str


TEXT: Codec[str] = Codec(parse=str, format=str, meaning="text")
INTEGER: Codec[int] = Codec(parse=int, format=str, meaning="a whole number")
NUMBER: Codec[float] = Codec(parse=float, format=repr, meaning="a number")
YES_NO: Codec[bool] = Codec(
    parse=lambda text: environment.str_to_bool(text, to_bool=True),
    format=lambda value: "true" if value else "false",
    meaning="true or false",
)
UPPER: Codec[str] = Codec(parse=str.upper, format=str, meaning="text")


def member_of(enum: type[E], *, upper: bool = False) -> Codec[E]:
    """Make the codec of an enum, written by value.

    Args:
        upper: Accept the text in any case, for enums whose values are in upper case.
    """
    return Codec(
        parse=lambda text: enum(text.upper() if upper else text),
        format=lambda member: str(member.value),
        meaning="one of " + ", ".join(str(member.value) for member in enum),
    )


@dataclass(frozen=True)
class Knob:
    """What is known of one option beside its name, type and default.

    Args:
        help: One line for users: in `--help`, in questions and in the documentation.
        codec: How the option's text is read and written.
        env: The variable that gives the value where the program does not.
        fallback: The value where neither the program nor the variable gives one.
        choices: The only values allowed; empty for any.
        flag: The name on the command line where it differs from the field's.
    """

    help: str
    codec: Codec[Any] = TEXT
    env: str | None = None
    fallback: Any = None
    choices: tuple[Any, ...] = ()
    flag: str | None = None

    def resolve(self, given: Any) -> Any:
        """Return the value in force: the given one, else the variable's, else the fallback.

        Raises:
            ConfigurationError: The variable holds a text that the codec cannot read.
        """
        if given is not None or self.env is None:
            return self.fallback if given is None else given
        text = environment.get(self.env)
        if not text:
            return self.fallback
        try:
            return self.codec.parse(text)
        except ValueError as error:
            raise ConfigurationError(
                f"The environment variable {self.env}={text!r} is not {self.codec.meaning}. Set it to that, or unset it."
            ) from error

    def check(self, owner: str, name: str, value: Any) -> None:
        """Refuse a value that is not among the choices.

        Raises:
            ConfigurationError: It is none of them.
        """
        if self.choices and value is not None and value not in self.choices:
            raise ConfigurationError(
                f"{owner}({name}={value!r}) is not a known choice. "
                f"Write one of {', '.join(repr(choice) for choice in self.choices)}."
            )


def knob(
    default: Any = None,
    *,
    help: str,
    env: str | None = None,
    codec: Codec[Any] = TEXT,
    fallback: Any = None,
    choices: tuple[Any, ...] = (),
    flag: str | None = None,
    default_factory: Callable[[], Any] | None = None,
) -> Any:
    """Declare an option as the field of a settings dataclass.

    Args:
        default: The field's default. None means "not given": the variable and then `fallback` are asked.
        default_factory: Makes the default, where it must be a new object each time.

    The other arguments are those of `Knob`.
    """
    declared = Knob(help=help, codec=codec, env=env, fallback=fallback, choices=choices, flag=flag)
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata={KEY: declared})
    return dataclasses.field(default=default, metadata={KEY: declared})


def knobs(settings: Any) -> dict[str, Knob]:
    """Return the declared options of a settings class or object, by field name."""
    return {item.name: item.metadata[KEY] for item in dataclasses.fields(settings) if KEY in item.metadata}
