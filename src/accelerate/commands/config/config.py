"""`accelerate config`: ask, and write the answers."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate._base.errors import UsageError
from accelerate.config.cli import spellings

description = "Make the file of options that `accelerate launch` takes its defaults from."


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate config`."""
    words: dict[str, Any] = {"description": description}
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser("accelerate config", **words)
        if subparsers is None
        else subparsers.add_parser("config", help=description, **words)
    )
    parser.add_argument(
        *spellings("--config_file"),
        default=None,
        help="Where to write the answers; the default place is the cache folder of Hugging Face.",
    )
    parser.set_defaults(func=config_command)
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask and write the answers.

    Raises:
        UsageError: The questions cannot be asked.
    """
    raise UsageError(
        "`accelerate config` has no questions to ask in this release. Run `accelerate config default`, which writes the "
        "options of this machine, and change that file, or give the options to `accelerate launch` as flags."
    )
