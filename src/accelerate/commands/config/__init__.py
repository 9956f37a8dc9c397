"""`accelerate config`: make and change the file of options."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate._base.lazy import attach, by_home
from accelerate.commands import run_as_program

_HERE = "accelerate.commands.config"
__getattr__, __dir__ = attach(
    __name__,
    by_home(
        {
            f"{_HERE}.cluster": "cluster get_cluster_input",
            f"{_HERE}.config": "config config_command config_command_parser get_user_input show_command_parser",
            f"{_HERE}.config_args": "config_args default_config_file load_config_from_file",
            f"{_HERE}.config_utils": "config_utils",
            f"{_HERE}.default": "default default_command_parser",
            f"{_HERE}.sagemaker": "sagemaker get_sagemaker_input",
            f"{_HERE}.update": "update update_command_parser",
        }
    ),
)


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate config` with its sub-commands."""
    from accelerate.commands.config.config import config_command_parser, show_command_parser
    from accelerate.commands.config.default import default_command_parser
    from accelerate.commands.config.update import update_command_parser

    parser = config_command_parser(subparsers)
    below = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(below, [])
    show_command_parser(below, [])
    update_command_parser(below, [])
    return parser


def main() -> None:
    """Run the program `accelerate-config`."""
    run_as_program("config")
