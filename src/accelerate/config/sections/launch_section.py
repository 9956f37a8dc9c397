"""What the launch options of one subject have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass
class LaunchSection:
    """Base of the groups of launch options; a field is an option, its default is the value where nobody says more.

    Attributes:
        title: Heading in `--help`.
        file_key: The dictionary of a file that holds these options; None for the top level of the file.
        prefix: What the keys in that dictionary may leave out.
        switch: The option that turns the subject on. While it is off, workers are told only what somebody gave.
    """

    title: ClassVar[str] = "options"
    file_key: ClassVar[str | None] = None
    prefix: ClassVar[str] = ""
    switch: ClassVar[str | None] = None
