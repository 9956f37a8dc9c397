"""`accelerate config update`: write a file anew in the keys of today."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_utils import FILE_HELP, SubcommandHelpFormatter, add_subcommand
from accelerate.config.cli import spellings
from accelerate.config.cluster_config import load_config_from_file
from accelerate.config.files import default_config_file

__all__ = [
    "SubcommandHelpFormatter",
    "default_config_file",
    "description",
    "load_config_from_file",
    "update_command_parser",
    "update_config",
    "update_config_command",
]

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
    made = add_subcommand(parser, parents, "update", description, update_config_command)
    made.add_argument(*spellings("--config_file"), default=None, help=FILE_HELP)
    return made


def update_config_command(args: argparse.Namespace) -> None:
    """Rewrite the file and say where it is."""
    print(f"Updated: {update_config(args)}")
