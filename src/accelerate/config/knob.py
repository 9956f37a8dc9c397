"""The declaration of one option: its meaning, and how its text in variables, flags and files is read and written."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import parse_json, shown
from accelerate.config import env as environment

_KEY = "knob"

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

Shape = Literal["value", "switch", "repeat", "place", "rest", "none"]
Reader = Literal["elastic", "launcher", "resolver"]
"""Who reads an option in the launching process: torch's elastic agent, a launcher, or the merge of the options itself."""


@dataclass(frozen=True)
class Codec(Generic[T]):
    """Read a value from text and write it back: `parse(format(value)) == value`.

    Args:
        meaning: What a right text is, for messages: "a whole number".
        adopt: Takes a value of a file, where it has a type of its own, into the text that `parse` reads; None refuses it.
    """

    parse: Callable[[str], T]
    format: Callable[[T], str]
    meaning: str
    adopt: Callable[[object], str | None] = lambda value: value if isinstance(value, str) else None

    def load(self, value: object) -> T:
        """Read a value of a file, which is text or has a type of its own already.

        Raises:
            ValueError: It is of a wrong type or cannot be read.
        """
        text = self.adopt(value)
        if text is None:
            raise ValueError(f"{value!r} is a {type(value).__name__}")
        return self.parse(text)


def _adopt_scalar(*types: type) -> Callable[[object], str | None]:
    # By exact type: to Python a bool is an int, to a reader of files it is not.
    return lambda value: str(value) if type(value) in (str, *types) else None


def _adopt_list(value: object) -> str | None:
    entries = value if isinstance(value, (list, tuple)) else [value]
    if not all(type(entry) in (str, int, float, bool) for entry in entries):
        return None
    return ",".join(str(entry) for entry in entries)


def _parse_flag(text: str) -> bool:
    return environment.str_to_bool(text, to_bool=True)


def _parse_integer(text: str) -> int:
    number = int(text)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{shown(text)} is larger than any number that a machine counts with")
    return number


TEXT: Codec[str] = Codec(parse=str, format=str, meaning="text", adopt=_adopt_scalar(int, float))
INTEGER: Codec[int] = Codec(parse=_parse_integer, format=str, meaning="a whole number", adopt=_adopt_scalar(int))
# OpenMP lists one number for each level of nesting; the first is that of the outermost.
THREADS: Codec[int] = dataclasses.replace(INTEGER, parse=lambda text: _parse_integer(text.split(",")[0]))
NUMBER: Codec[float] = Codec(parse=float, format=repr, meaning="a number", adopt=_adopt_scalar(int, float))
YES_NO: Codec[bool] = Codec(
    parse=_parse_flag,
    format=lambda value: "true" if value else "false",
    meaning="true or false",
    adopt=_adopt_scalar(bool, int),
)
# The same with the other words that variables have always held.
TRUE_FALSE: Codec[bool] = dataclasses.replace(YES_NO, format=str)
ONE_ZERO: Codec[bool] = dataclasses.replace(YES_NO, format=lambda value: "1" if value else "0")
# A switch whose variable is there only while it is on: no text is off.
ON_TRUE: Codec[bool] = dataclasses.replace(
    YES_NO, parse=lambda text: bool(text) and _parse_flag(text), format=lambda value: "true" if value else ""
)
ON_ONE: Codec[bool] = dataclasses.replace(ON_TRUE, format=lambda value: "1" if value else "")
# Either a yes or no, or a word: written as given, a yes or no in lower case.
TEXT_OR_FLAG: Codec[str] = Codec(
    parse=lambda text: text.lower() if text.lower() in ("true", "false") else text,
    format=str,
    meaning="true, false or a name",
    adopt=_adopt_scalar(bool, int),
)
# Several names in one text, between commas.
NAMES: Codec[str] = Codec(parse=str, format=str, meaning="names between commas", adopt=_adopt_list)
UPPER: Codec[str] = Codec(parse=str.upper, format=str, meaning="text")


def flags(count: int) -> Codec[tuple[bool, ...]]:
    """Make the codec of several yes or no between commas; one alone stands for all of them."""

    def parse(text: str) -> tuple[bool, ...]:
        # Files hold tuples as Python prints them, too.
        words = text.strip("()[] ").split(",")
        if len(words) not in (1, count):
            raise ValueError(f"{text!r} holds {len(words)} words instead of {count}")
        values = tuple(_parse_flag(word) for word in words)
        return values * count if len(values) == 1 else values

    return Codec(
        parse=parse,
        format=lambda values: ",".join(str(value) for value in values),
        meaning=f"a list of {count} such as `true,false,true`",
        adopt=_adopt_list,
    )


def word_of(*words: str, written_upper: bool = False, aliases: Mapping[str, str] | None = None) -> Codec[str]:
    """Make the codec of a text that is one of a few words, in any case.

    Args:
        written_upper: Variables hold the word in upper case, though it is in lower case.
        aliases: Other spellings that are accepted, and the word each stands for.
    """
    by_text = {word.lower(): word for word in words}
    by_text |= {alias.lower(): word for alias, word in (aliases or {}).items()}

    def parse(text: str) -> str:
        if text.lower() not in by_text:
            raise ValueError(f"{text!r} is none of {', '.join(words)}")
        return by_text[text.lower()]

    def adopt(value: object) -> str | None:
        # YAML reads the bare words `no` and `off` as False: the file says one of ours, if we have it.
        if isinstance(value, bool):
            return "no" if not value and "no" in by_text else None
        return str(value) if isinstance(value, (str, int)) else None

    return Codec(parse, str.upper if written_upper else str, "one of " + ", ".join(words), adopt)


def matching(pattern: str, meaning: str) -> Codec[str]:
    """Make the codec of a text that is written in a certain way."""

    def parse(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError(f"{text!r} does not match {pattern}")
        return text

    return Codec(parse, str, meaning, _adopt_scalar(int))


def or_auto(codec: Codec[Any]) -> Codec[Any]:
    """Make a codec that also takes the word `auto`, which an engine replaces by a value of its own."""
    return Codec(
        parse=lambda text: "auto" if text == "auto" else codec.parse(text),
        format=lambda value: "auto" if value == "auto" else codec.format(value),
        meaning=f"{codec.meaning}, or auto",
        adopt=codec.adopt,
    )


def _adopt_entries(value: object) -> str | None:
    entries = list(value) if isinstance(value, (list, tuple)) else [value]
    return json.dumps([str(entry) for entry in entries]) if all(type(e) in (str, int, float) for e in entries) else None


def _parse_entries(text: str) -> list[str]:
    try:
        entries = parse_json(text) if text.startswith("[") else [text]
    except ValueError:
        return [text]
    return [entry if isinstance(entry, str) else shown(entry) for entry in entries]


# Several texts, which may hold anything: as JSON.
REPEATED: Codec[list[str]] = Codec(
    parse=_parse_entries, format=json.dumps, meaning="a list of texts", adopt=_adopt_entries
)


def _parse_object(text: str) -> dict[str, Any]:
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"{shown(text)} is not an object")
    return found


JSON_OBJECT: Codec[dict[str, Any]] = Codec(
    parse=_parse_object,
    format=json.dumps,
    meaning="a JSON object",
    adopt=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)


def member_of(enum: type[E], *, upper: bool = False) -> Codec[E]:
    """Make the codec of an enum, written by value.

    Args:
        upper: Accept the text in any case, for enums whose values are in upper case.
    """
    return Codec(
        parse=lambda text: enum(text.upper() if upper else text),
        format=lambda member: str(member.value),
        meaning="one of " + ", ".join(str(member.value) for member in enum),
        adopt=lambda value: str(value.value) if isinstance(value, enum) else value if isinstance(value, str) else None,
    )


Condition = Callable[[Mapping[str, Any]], bool]
"""Asks something of all options by name."""


@dataclass(frozen=True)
class Ask:
    """How `accelerate config` asks for an option.

    Args:
        text: The question, where the option's help does not serve as one.
        default: The answer that is offered, where it differs from the option's default.
        choices: The answers to choose from, where the option does not list its own.
        optional: No answer leaves the option out.
        only_if: Says whether to ask, from every option by name as answered so far, and `distributed_type`.
        after: The option whose question comes right before, where that is not the one declared before.
    """

    text: str = ""
    default: Any = None
    choices: tuple[Any, ...] = ()
    optional: bool = False
    only_if: Condition | None = None
    after: str = ""


@dataclass(frozen=True)
class Knob:
    """What is known of one option beside its name, type and default.

    Args:
        help: One line for users: in `--help`, in questions and in the documentation.
        codec: How the option's text is read and written; by its choices or its type where it is not given.
        env: The variable that gives the value where the program does not. Several names between commas each hold one
            part of a text that has commas itself.
        fallback: The value where neither the program nor the variable gives one.
        choices: The only values allowed; empty for any.
        shape: What follows the flag on the command line: one value; nothing (a switch); one value each time it is
            repeated; "place" and "rest" are arguments without a flag; "none" has no place on the command line.
        short: The flag of one letter, with its dash.
        also: Other names of the flag: those that torchrun has for it.
        negative: The name of the switch that turns a switch off.
        yaml: The key in files where it differs from the field's; "" where files cannot hold the option.
        old_keys: Keys of older files that mean the same.
        reader: Who reads the value, if it is not (only) the worker through `env`.
        secret: Never show the value.
        engine_only: Workers are told of it only while the engine of its section is on, even if somebody gave it.
        idle: What to say to who types the option where it changes nothing: always, or with `engine_only` without the
            engine.
        only_if: Says, from the values of all options, whether this one means anything.
        ask: How it is asked for; None asks nobody.
    """

    help: str
    codec: Codec[Any] = TEXT
    env: str | None = None
    fallback: Any = None
    choices: tuple[Any, ...] = ()
    shape: Shape = "value"
    short: str | None = None
    also: tuple[str, ...] = ()
    negative: str | None = None
    yaml: str | None = None
    old_keys: tuple[str, ...] = ()
    reader: Reader | None = None
    secret: bool = False
    engine_only: bool = False
    idle: str = ""
    only_if: Condition | None = None
    ask: Ask | None = None

    def encode(self, value: Any) -> dict[str, str]:
        """Return the variables that hold a value; none where the value is off or not given."""
        if self.env is None or value is None:
            return {}
        names, text = self.env.split(","), self.codec.format(value)
        parts = text.split(",") if len(names) > 1 else [text]
        return {name: part for name, part in zip(names, parts, strict=True) if part}

    def decode(self, environ: Mapping[str, str]) -> Any:
        """Return the value that the variables hold; None where they are not set.

        Raises:
            ConfigurationError: The variables hold a text that the codec cannot read.
        """
        names = self.env.split(",") if self.env else []
        texts = [environ[name] for name in names if environ.get(name)]
        if not names or len(texts) < len(names):
            return None
        text = ",".join(texts)
        try:
            return self.codec.parse(text)
        except ValueError as error:
            raise ConfigurationError(
                f"The environment variable {self.env}={shown(text)} is not {self.codec.meaning}. "
                "Set it to that, or unset it."
            ) from error

    def resolve(self, given: Any) -> Any:
        """Return the value in force: the given one, else the variable's, else the fallback.

        Raises:
            ConfigurationError: The variable holds a text that the codec cannot read.
        """
        if given is not None or self.env is None:
            return self.fallback if given is None else given
        found = self.decode({name: environment.get(name, "") for name in self.env.split(",")})
        return self.fallback if found is None else found

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


def knob(default: Any = None, *, default_factory: Callable[[], Any] | None = None, **declared: Any) -> Any:
    """Declare an option as the field of a settings class or of a launch section.

    Args:
        default: The field's default. None means "not given": the variable and then `fallback` are asked.
        default_factory: Makes the default, where it must be a new object each time.
        declared: The arguments of `Knob`.
    """
    if default_factory is not None:
        return dataclasses.field(default_factory=default_factory, metadata={_KEY: declared})
    return dataclasses.field(default=default, metadata={_KEY: declared})


def shared(owner: type, name: str, default: Any = None, **changes: Any) -> Any:
    """Declare an option that another class has declared already, under another name or with another default.

    Args:
        changes: Arguments of `Knob` that differ here.
    """
    return dataclasses.field(default=default, metadata={_KEY: {**vars(knobs(owner)[name]), **changes}})


_CODECS: dict[str, Codec[Any]] = {"int": INTEGER, "float": NUMBER, "bool": YES_NO}


@functools.cache
def _knobs(owner: type) -> dict[str, Knob]:
    found: dict[str, Knob] = {}
    for name, item in declared_fields(owner).items():
        if _KEY not in item.metadata:
            continue
        declared = dict(item.metadata[_KEY])
        choices = declared.get("choices", ())
        if "codec" not in declared and choices and all(isinstance(choice, str) for choice in choices):
            declared["codec"] = word_of(*choices)
        declared.setdefault("codec", _CODECS.get(str(item.type).removesuffix(" | None"), TEXT))
        if issubclass(owner, LaunchSection):
            declared.setdefault("only_if", owner.only_if)
            declared.setdefault("reader", owner.reader)
            declared.setdefault("yaml", None if owner.in_files else "")
            if owner.variables is not None and declared["reader"] is None:
                declared.setdefault("env", owner.variables + name.upper())
        found[name] = Knob(**declared)
    return found


def declared_fields(owner: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a settings class or of a launch section by name."""
    if dataclasses.is_dataclass(owner):
        return {item.name: item for item in dataclasses.fields(owner)}
    found = {name: item for name, item in vars(owner).items() if isinstance(item, dataclasses.Field)}
    for name, item in found.items():
        item.type = owner.__annotations__[name]
    return found


def knobs(settings: Any) -> dict[str, Knob]:
    """Return the declared options of a class or object, by field name."""
    return _knobs(settings if isinstance(settings, type) else type(settings))


class LaunchSection:
    """Base of the groups of launch options; a field is an option, its default is the value where nobody says more.

    No dataclass, because nobody makes an instance, and to make fourteen such classes takes a launcher's time.

    Attributes:
        title: Heading in `--help`.
        file_key: The dictionary of a file that holds these options; None for the top level of the file.
        prefix: What the keys in that dictionary may leave out.
        switch: The option that turns the subject on. While it is off, workers are told only what somebody gave.
        in_files: Whether files hold these options, unless one says otherwise.
        variables: What stands before an option's name in the name of its variable; None where each one says its own.
        reader: Who reads the options in the launching process.
        only_if: Says, from the values of all options, whether those of the section mean anything.
        rest: The option that holds, by key, what else the dictionary of a file may contain; None where that is nothing.
    """

    title: ClassVar[str] = "options"
    file_key: ClassVar[str | None] = None
    prefix: ClassVar[str] = ""
    switch: ClassVar[str | None] = None
    in_files: ClassVar[bool] = True
    variables: ClassVar[str | None] = None
    reader: ClassVar[Reader | None] = None
    only_if: ClassVar[Condition | None] = None
    rest: ClassVar[str | None] = None

    @classmethod
    def rest_keys(cls) -> tuple[str, ...]:
        """Return the keys that `rest` may hold."""
        return ()


@dataclass
class Settings:
    """Base of the option classes that programs make: what the program says wins over the environment, that over the default."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The declarations are the documentation of the arguments.
        fields = {name: item for name, item in vars(cls).items() if isinstance(item, dataclasses.Field)}
        rows = [f"        {name}: {item.metadata[_KEY]['help']}" for name, item in fields.items() if item.metadata]
        if rows and cls.__doc__:
            said, heading, raises = cls.__doc__.partition("    Raises:\n")
            cls.__doc__ = "\n".join([said.rstrip(), "", "    Args:", *rows, "", heading + raises])

    def __post_init__(self) -> None:
        for name, declared in knobs(self).items():
            setattr(self, name, declared.resolve(getattr(self, name)))
        self.normalise()
        for name, declared in knobs(self).items():
            declared.check(type(self).__name__, name, getattr(self, name))

    def normalise(self) -> None:
        """Bring the values into their final form and refuse those that contradict each other."""


@dataclass
class KwargsHandler(Settings):
    """Base of the option classes whose fields are the keyword arguments of something else."""

    def to_dict(self) -> dict[str, Any]:
        """Return a deep copy of the values."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the values that differ from those of an instance made without arguments and variables."""
        with environment.without_accelerate_environment():
            default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if name not in default or default[name] != value}
