"""`accelerate config update`: write a file anew in the keys of today."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_utils import SubcommandHelpFormatter
from accelerate.config.cli import spellings
from accelerate.config.cluster_config import load_config_from_file
from accelerate.config.files import default_config_file

description = "Bring a file of options to the keys and defaults of this release."


def update_config(args: argparse.Namespace) -> str:
    """Rewrite the file and return its path.

    Raises:
        ConfigurationError: It is missing, does not parse, or holds what no release knew.
    """
    path = str(args.config_file or default_config_file)
    config = load_config_from_file(Path(path))
    if path.endswith(".json"):
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
    return path


def update_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config update`."""
    made: argparse.ArgumentParser = parser.add_parser(
        "update", parents=parents, help=description, formatter_class=SubcommandHelpFormatter
    )
    made.add_argument(
        *spellings("--config_file"),
        default=None,
        help="The file; the default one is in the cache folder of Hugging Face.",
    )
    made.set_defaults(func=update_config_command)
    return made


def update_config_command(args: argparse.Namespace) -> None:
    """Rewrite the file and say where it is."""
    print(f"Updated: {update_config(args)}")
