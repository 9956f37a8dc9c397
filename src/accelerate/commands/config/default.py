"""`accelerate config default`: write the options of this machine, without questions."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate.commands.config.basic import write_basic_config
from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.config.cli import spellings
from accelerate.config.files import default_json_config_file
from accelerate.config.sections.launch import PRECISIONS

description = "Write a file of options for the hardware that this machine has."

__all__ = ["default_command_parser", "default_config_command", "description", "write_basic_config"]


def default_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config default`."""
    made: argparse.ArgumentParser = parser.add_parser(
        "default", parents=parents, help=description, formatter_class=SubcommandHelpFormatter
    )
    made.add_argument(
        *spellings("--config_file"),
        default=default_json_config_file,
        dest="save_location",
        help="Where to write the file; the default place is the cache folder of Hugging Face.",
    )
    made.add_argument(
        *spellings("--mixed_precision"), choices=PRECISIONS[:3], default="no", help="Number format of training."
    )
    made.set_defaults(func=default_config_command)
    return made


def default_config_command(args: argparse.Namespace) -> None:
    """Write the file and say where it is."""
    written = write_basic_config(args.mixed_precision, args.save_location)
    if written:
        print(f"The options of this machine are in {written}")
    else:
        print(f"There is a file already, left as it is: {args.save_location}. Remove it first, or pass --config_file.")
