"""Launch options that say what to run and how much to tell about it."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.config.knob import ON_TRUE, REPEATED, YES_NO, Ask, knob
from accelerate.config.sections.asking import several_processes
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class RunOptions(LaunchSection):
    """The script, and how it is started."""

    config_file: str | None = knob(
        help="YAML or JSON file to take defaults from, instead of the one in the cache folder.",
        yaml="",
        reader="resolver",
    )
    quiet: bool = knob(
        False,
        help="Leave out the report when a worker fails; only its own output is shown.",
        codec=YES_NO,
        shape="switch",
        short="-q",
        yaml="",
        reader="launcher",
    )
    module: bool = knob(
        False,
        help="Run the script as a module, as `python -m` does.",
        codec=YES_NO,
        shape="switch",
        short="-m",
        yaml="",
        reader="launcher",
    )
    no_python: bool = knob(
        False,
        help="Run the script as a program of its own, without a Python interpreter before it.",
        codec=YES_NO,
        shape="switch",
        yaml="",
        reader="launcher",
    )
    debug: bool = knob(
        False,
        help="Check in every collective that all processes agree about its shapes; slower.",
        codec=ON_TRUE,
        env="ACCELERATE_DEBUG_MODE",
        shape="switch",
        ask=Ask(only_if=several_processes),
    )
    training_script: str | None = knob(
        help="Path of the script, or name of the module, to run in every process.",
        shape="place",
        yaml="",
        reader="launcher",
    )
    training_script_args: list[str] | None = knob(
        help="Arguments of the script, handed on as they are.",
        codec=REPEATED,
        shape="rest",
        yaml="",
        reader="launcher",
    )
