"""The merged options of a launch, each with where it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.config.sections.launch import options
from accelerate.config.sections.launch_section import LaunchSection

if TYPE_CHECKING:
    from accelerate.config.files import ConfigFile
    from accelerate.devices.machine import Machine

S = TypeVar("S", bound=LaunchSection)

HIDDEN = "(hidden)"


class Source(Enum):
    """Who said a value, the strongest first."""

    FLAG = "flag"
    FILE = "file"
    ENVIRONMENT = "environment"
    DETECTED = "detected"
    DEFAULT = "default"


@dataclass(frozen=True)
class Origin:
    """Where a value came from: who, and the flag, key, variable or reason."""

    source: Source
    detail: str = ""

    def __str__(self) -> str:
        mark = ":" if self.source is Source.DETECTED else ""
        return f"{self.source.value}{mark} {self.detail}".rstrip()


@dataclass(frozen=True)
class Resolved:
    """A value and its origin."""

    value: Any
    origin: Origin


class RunConfig(Mapping[str, Any]):
    """The options of one launch by name: `config["num_processes"]`, `config.origin("num_processes")`.

    Args:
        machine: The machine that the options were merged for.
        file: The file that took part; None without one.
        notes: Sentences for the user about decisions that were made.
    """

    def __init__(
        self,
        values: Mapping[str, Resolved],
        *,
        machine: Machine,
        file: ConfigFile | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._values = dict(values)
        self.machine = machine
        self.file = file
        self.notes = notes

    def __getitem__(self, name: str) -> Any:
        return self._values[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def resolved(self, name: str) -> Resolved:
        """Return a value together with its origin."""
        return self._values[name]

    def origin(self, name: str) -> str:
        """Return the origin as text, such as `flag --num_processes`."""
        return str(self._values[name].origin)

    def is_given(self, name: str) -> bool:
        """Say whether somebody chose the value: by a flag, a file or a variable."""
        return self._values[name].origin.source not in (Source.DETECTED, Source.DEFAULT)

    def section(self, section: type[S]) -> S:
        """Return the options of one subject as an object with attributes."""
        return section(**{field.name: self[field.name] for field in dataclasses.fields(section)})

    def rows(self) -> Iterator[tuple[str, str, Any, str]]:
        """Yield heading, name, value and origin of every option; secrets are hidden."""
        for name, option in options().items():
            value = self[name]
            shown = HIDDEN if option.knob.secret and value is not None else value
            yield option.section.title, name, shown, self.origin(name)
