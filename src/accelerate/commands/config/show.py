"""`accelerate config show`: what is in force, and where each value came from."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.config import env
from accelerate.config.cli import spellings

description = "Show the options that a launch without flags would use, and where each came from."


def show_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config show`."""
    made: argparse.ArgumentParser = parser.add_parser(
        "show", parents=parents, help=description, formatter_class=SubcommandHelpFormatter
    )
    made.add_argument(
        *spellings("--config_file"),
        default=None,
        help="The file; the default one is in the cache folder of Hugging Face.",
    )
    made.add_argument("--verbose", action="store_true", help="Show the values that are defaults as well.")
    made.set_defaults(func=show_config_command)
    return made


def show_config_command(args: argparse.Namespace) -> None:
    """Print every option with its origin.

    Raises:
        ConfigurationError: The file is missing or wrong; or a launch here would refuse what was printed.
    """
    from accelerate.commands.explain import table_of, wide_console
    from accelerate.config.conflicts import check
    from accelerate.config.resolve import merge
    from accelerate.devices.machine import detect

    variables = env.items()
    machine = detect(variables)
    config = merge(argparse.Namespace(config_file=args.config_file), machine, environ=variables)
    console = wide_console()
    console.print(f"machine: {machine}", soft_wrap=True)
    console.print(f"file: {config.file.path if config.file is not None else 'none'}", soft_wrap=True)
    console.print(table_of(config, "What a launch would use", verbose=args.verbose))
    if not args.verbose:
        console.print("Values that are defaults are left out; --verbose shows them.", style="dim")
    for note in config.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    check(config, variables)
