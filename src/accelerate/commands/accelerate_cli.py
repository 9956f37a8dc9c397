"""The `accelerate` program: find the sub-command and import nothing else."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from accelerate._base.errors import AccelerateError


@dataclass(frozen=True)
class SubCommand:
    """A sub-command: the module with its parser, which names the function that runs it.

    Args:
        parser: The function of the module that makes the parser.
        function: The function that runs it, where the parser names none.
    """

    name: str
    help: str
    module: str
    parser: str
    function: str = ""


COMMANDS = (
    SubCommand(
        "checkpoints",
        "Show the checkpoints of a run, verify them, remove old ones",
        "checkpoints",
        "checkpoints_command_parser",
    ),
    SubCommand(
        "completion", "Print a script that completes this program in a shell", "completion", "completion_command_parser"
    ),
    SubCommand("config", "Write, update and convert the file of launch options", "config", "get_config_parser"),
    SubCommand("env", "Show what a report of a problem needs", "env", "env_command_parser"),
    SubCommand("estimate-memory", "Say how much memory a model needs", "estimate", "estimate_command_parser"),
    SubCommand("launch", "Start a script on one process or many", "launch", "launch_command_parser", "launch_in_place"),
    SubCommand("merge-weights", "Merge the shards of a checkpoint", "merge", "merge_command_parser"),
    SubCommand("test", "Check that the configured processes work", "test", "test_command_parser"),
    SubCommand("to-fsdp2", "Rewrite a configuration for FSDP version 2", "to_fsdp2", "to_fsdp2_command_parser"),
    SubCommand("tpu-config", "Run commands on the machines of a TPU pod", "tpu", "tpu_command_parser"),
)


def main() -> None:
    """Run the sub-command that the command line names."""
    leave(lambda: run(sys.argv[1:]))


def leave(program: Callable[[], int]) -> NoReturn:
    """Run a program and end this process with its exit code.

    Where torch was loaded, its modules are not taken down one by one: nobody needs them, and it takes a tenth of the
    time of a short run.
    """
    try:
        code: int | str | None = program()
    except SystemExit as error:
        code = 0 if error.code is None else error.code
    if not isinstance(code, int) or "torch" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def run(arguments: Sequence[str]) -> int:
    """Run a sub-command and return the exit code."""
    name, *rest = arguments or [""]
    if name in {"", "-h", "--help", "help"}:
        sys.stdout.write(_help())
        return 0 if name else 1
    if name in {"--version", "version"}:
        from accelerate import __version__

        sys.stdout.write(f"{__version__}\n")
        return 0
    commands = {command.name: command for command in COMMANDS}
    command = commands.get(name.replace("_", "-"))
    if command is None:
        import difflib

        near = difflib.get_close_matches(name, commands, n=1)
        hint = f"Did you mean `accelerate {near[0]}`?" if near else "See `accelerate --help`."
        sys.stderr.write(f"accelerate: error: {name!r} is not a command. {hint}\n")
        return 2
    return run_command(command, rest)


def run_command(command: SubCommand, arguments: Sequence[str]) -> int:
    """Import one sub-command, let it parse its arguments and run it; a mistake of the user's is one line and code 2."""
    module: Any = importlib.import_module(f"accelerate.commands.{command.module}")
    title = f"accelerate {command.name}"
    try:
        parser = getattr(module, command.parser)()
        parser.prog = title
        options = parser.parse_args(list(arguments))
        function = getattr(options, "func", None) or getattr(module, command.function)
        function(options)
    except AccelerateError as error:
        sys.stderr.write(f"{title}: error: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def find(name: str) -> SubCommand:
    """Return a sub-command of the table, for programs that start it under a name of their own."""
    return next(command for command in COMMANDS if command.name == name)


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS) + 2
    lines = "\n".join(f"  {command.name:<{width}}{command.help}" for command in COMMANDS)
    return (
        "usage: accelerate <command> [options]\n\n"
        f"commands:\n{lines}\n\n"
        "  accelerate <command> --help  shows the options of a command\n"
        "  accelerate --version         shows the version\n"
    )


if __name__ == "__main__":
    main()
