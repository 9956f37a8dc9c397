"""The merged options of a launch, each with where it came from, and the variables by which workers learn them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from accelerate.config.sections.engines import DeepSpeedOptions
from accelerate.config.sections.registry import LaunchOption, options

if TYPE_CHECKING:
    from accelerate.config.files import ConfigFile
    from accelerate.devices.machine import Machine

HIDDEN = "(hidden)"
# The libraries of Intel's threads, where the CPU does the work: threads stay on their cores and do not spin.
_CPU_THREADS = {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}


class OptionSource(Enum):
    """Who said a value, the strongest first."""

    FLAG = "flag"
    FILE = "file"
    ENVIRONMENT = "environment"
    DETECTED = "detected"
    DEFAULT = "default"


@dataclass(frozen=True)
class Origin:
    """Where a value came from: who, and the flag, key, variable or reason."""

    source: OptionSource
    detail: str = ""

    def __str__(self) -> str:
        mark = ":" if self.source is OptionSource.DETECTED else ""
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

    def shown(self, name: str) -> str:
        """Return an option with its value and its origin, for messages."""
        return f"{name}={self[name]!r} ({self.origin(name)})"

    def is_given(self, name: str) -> bool:
        """Say whether somebody chose the value: by a flag, a file or a variable."""
        return self._values[name].origin.source not in (OptionSource.DETECTED, OptionSource.DEFAULT)

    def is_typed(self, name: str) -> bool:
        """Say whether the value was given on the command line of this run."""
        return self._values[name].origin.source is OptionSource.FLAG

    def is_default(self, name: str) -> bool:
        """Say whether nobody chose the value and nothing was found out about it."""
        return self._values[name].origin.source is OptionSource.DEFAULT

    def rows(self) -> Iterator[tuple[str, str, Any, str]]:
        """Yield heading, name, value and origin of every option; secrets are hidden."""
        for name, option in options().items():
            value = self[name]
            shown = HIDDEN if option.knob.secret and value is not None else value
            yield option.section.title, name, shown, self.origin(name)


def encode(config: RunConfig) -> dict[str, str]:
    """Return the variables of a run; each option's are those of its declaration."""
    variables: dict[str, str] = {}
    for option in options().values():
        if _reaches_worker(option, config):
            variables |= option.knob.encode(config[option.name])
    visible, chosen = config.machine.visible_devices_variable, config["gpu_ids"]
    if visible and chosen and chosen != "all":
        variables[visible] = chosen
    if config["cpu"]:
        variables |= _CPU_THREADS
    in_file = config.file.values if config.file is not None else {}
    if config["use_deepspeed"]:
        # What the file gave, DeepSpeed's own file must not give a second time.
        known = [name for name, option in options().items() if option.section is DeepSpeedOptions]
        fields = [name for name in (*known, "mixed_precision") if name in in_file]
        variables["ACCELERATE_CONFIG_DS_FIELDS"] = ",".join(fields)
    job = config.file.sagemaker if config.file is not None else None
    if job is not None:
        variables["ACCELERATE_USE_SAGEMAKER"] = "true"
        variables["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] = str(job["distributed_type"])
    return variables


def _reaches_worker(option: LaunchOption, config: RunConfig) -> bool:
    """Say whether workers are told: always what somebody chose, and the defaults of what is in use."""
    if option.knob.secret and config.resolved(option.name).origin.source is OptionSource.ENVIRONMENT:
        return False  # workers inherit it, and it stays out of what is written and shown
    on = option.section.switch is None or bool(config[option.section.switch])
    if option.knob.engine_only and not on:
        return config.resolved(option.name).origin.source is OptionSource.ENVIRONMENT
    if config.is_given(option.name):
        return True
    return on and (option.knob.only_if is None or option.knob.only_if(config))
