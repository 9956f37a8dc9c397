"""The base of all option classes: what the program says wins over the environment, and that over the default."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from accelerate.config import env
from accelerate.config.knob import knobs


@dataclass
class Settings:
    """Fill every option that was not given (None) from its variable, then from its fallback."""

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
        with env.without_accelerate_environment():
            default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if name not in default or default[name] != value}
