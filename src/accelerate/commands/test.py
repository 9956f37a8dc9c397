"""`accelerate test`: run a self-check on the processes that are configured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate._base.lazy import attach, by_home
from accelerate.commands import run_as_program
from accelerate.config.cli import spellings

# Imported when they are read: this folder and the test helpers stand side by side.
__getattr__, __dir__ = attach(
    __name__, by_home({"accelerate.test_utils.testing": "execute_subprocess_async path_in_accelerate_package"})
)

SCRIPT = Path(__file__).resolve().parents[1] / "test_utils" / "scripts" / "test_script.py"


class _Parser(argparse.ArgumentParser):
    """Keep what is meant for the launcher in `launch_options`."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        options, rest = self.parse_known_args(args, namespace)
        options.launch_options = rest
        return options


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # noqa: PT028 - no test: a fixed name
    """Make the parser of `accelerate test`."""
    texts: dict[str, Any] = {
        "description": "Check process control, collectives, loaders and training on the configured processes.",
        "epilog": "All options of `accelerate launch` are taken too: `accelerate test --cpu --num_processes 2`.",
        "allow_abbrev": False,
    }
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = _Parser("accelerate test", usage="%(prog)s [options] [options of accelerate launch]", **texts)
    else:
        parser = subparsers.add_parser("test", **texts)
    parser.set_defaults(func=test_command)
    parser.add_argument(*spellings("--config_file"), default=None, help="The configuration file to test.")
    return parser


def test_command(args: argparse.Namespace) -> None:
    """Launch the self-check and wait; a check that fails ends this program with a code that is not zero.

    Raises:
        ConfigurationError: If the options cannot work, alone or together.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser

    parser = launch_command_parser()
    parser.prog = "accelerate test"
    named = ["--config_file", args.config_file] if args.config_file is not None else []
    options = parser.parse_args([*named, *getattr(args, "launch_options", ()), str(SCRIPT)])
    if options.training_script != str(SCRIPT):
        parser.error(f"{options.training_script!r} is no option, and the script is the library's own")
    launch_command(options)


def main() -> None:
    """Run it, as a program of its own."""
    run_as_program("test")


if __name__ == "__main__":
    main()
