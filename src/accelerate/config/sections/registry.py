"""The launch options of all subjects, in the order of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from accelerate.config.knob import Knob, LaunchSection, declared_fields, knobs
from accelerate.config.sections import compute, engines, launch, torchrun

SECTIONS: tuple[type[LaunchSection], ...] = (
    launch.RunOptions,
    launch.HardwareOptions,
    launch.ResourceOptions,
    compute.DynamoOptions,
    launch.ParadigmOptions,
    launch.DistributedOptions,
    torchrun.TorchrunOptions,
    launch.TpuOptions,
    engines.DeepSpeedOptions,
    engines.FsdpOptions,
    engines.MegatronOptions,
    compute.Fp8Options,
    launch.AwsOptions,
    launch.MpiOptions,
    compute.ParallelismOptions,
)


@dataclass(frozen=True)
class LaunchOption:
    """One launch option: its name, its declaration, and the subject that it belongs to."""

    name: str
    knob: Knob
    section: type[LaunchSection]
    default: Any

    @property
    def flag(self) -> str | None:
        """The long flag as users write it; None for an option without one."""
        return None if self.knob.shape in ("place", "rest", "none") else f"--{self.name}"

    @property
    def file_key(self) -> str | None:
        """The key in files, inside the section's dictionary where it has one; None where files cannot hold it."""
        key = self.name if self.knob.yaml is None else self.knob.yaml
        return key or None

    @property
    def place(self) -> str:
        """How a message names the option: its flag, else its key."""
        return self.flag or self.file_key or self.name


@cache
def options() -> dict[str, LaunchOption]:
    """Return every launch option by name."""
    return {
        name: LaunchOption(name, declared, section, declared_fields(section)[name].default)
        for section in SECTIONS
        for name, declared in knobs(section).items()
    }
