"""The launch options of all subjects, in the order of `--help`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Any

from accelerate.config.knob import Knob, knobs
from accelerate.config.sections.aws import AwsOptions
from accelerate.config.sections.deepspeed import DeepSpeedOptions
from accelerate.config.sections.distributed import DistributedOptions
from accelerate.config.sections.dynamo import DynamoOptions
from accelerate.config.sections.fp8 import Fp8Options
from accelerate.config.sections.fsdp import FsdpOptions
from accelerate.config.sections.hardware import HardwareOptions
from accelerate.config.sections.launch_section import LaunchSection
from accelerate.config.sections.megatron import MegatronOptions
from accelerate.config.sections.mpi import MpiOptions
from accelerate.config.sections.paradigm import ParadigmOptions
from accelerate.config.sections.parallelism import ParallelismOptions
from accelerate.config.sections.resources import ResourceOptions
from accelerate.config.sections.run import RunOptions
from accelerate.config.sections.tpu import TpuOptions

SECTIONS: tuple[type[LaunchSection], ...] = (
    RunOptions,
    HardwareOptions,
    ResourceOptions,
    DynamoOptions,
    ParadigmOptions,
    DistributedOptions,
    TpuOptions,
    DeepSpeedOptions,
    FsdpOptions,
    MegatronOptions,
    Fp8Options,
    AwsOptions,
    MpiOptions,
    ParallelismOptions,
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
        if self.knob.shape in ("place", "rest", "none"):
            return None
        return f"--{self.knob.flag or self.name}"

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
    found: dict[str, LaunchOption] = {}
    for section in SECTIONS:
        defaults = {field.name: field.default for field in dataclasses.fields(section)}
        for name, declared in knobs(section).items():
            found[name] = LaunchOption(name, declared, section, defaults[name])
    return found
