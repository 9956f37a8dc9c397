"""The sub-commands of `accelerate`, a module each, and how a module makes its parser and runs as a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import argparse


def command_parser(name: str, subparsers: Any, **texts: Any) -> argparse.ArgumentParser:
    """Make the parser of a sub-command.

    Args:
        subparsers: What `add_subparsers` of another parser returned, to add this one to; None makes one by itself.
        texts: Arguments of `argparse.ArgumentParser`.
    """
    import argparse  # here, because `accelerate --help` does without it

    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser(f"accelerate {name}", **texts)
    else:
        parser = subparsers.add_parser(name, **texts)
    return parser


def run_as_program(name: str) -> NoReturn:
    """Run a sub-command with the arguments of this process, and end the process with its exit code."""
    import sys

    from accelerate.commands.accelerate_cli import find, leave, run_command

    leave(lambda: run_command(find(name), sys.argv[1:]))
