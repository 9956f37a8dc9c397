"""`accelerate config default`: write the options of this machine, without questions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from accelerate._base.enums import ComputeEnvironment, DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate.commands.config.config_utils import SubcommandHelpFormatter, add_subcommand
from accelerate.config import env
from accelerate.config.cli import spellings
from accelerate.config.cluster_config import ClusterConfig
from accelerate.config.files import default_json_config_file, place_to_write
from accelerate.config.sections.launch import PRECISIONS
from accelerate.devices.machine import detect

__all__ = [
    "ClusterConfig",
    "SubcommandHelpFormatter",
    "default_command_parser",
    "default_config_command",
    "default_json_config_file",
    "description",
    "write_basic_config",
]

description = "Write a file of options for the hardware that this machine has."


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path = default_json_config_file
) -> Path | Literal[False]:
    """Write a file of options for the hardware that this machine has.

    Args:
        mixed_precision: The number format of training.
        save_location: Where to write it.

    Returns:
        The path of the file; False if there is one already, which is left as it is.

    Raises:
        ConfigurationError: The number format is not known, or the file cannot be written there.
    """
    if mixed_precision.lower() not in PRECISIONS:
        raise ConfigurationError(
            f"write_basic_config(mixed_precision={mixed_precision!r}) is not a known number format. "
            f"Write one of {', '.join(PRECISIONS)}."
        )
    path = place_to_write(save_location)
    if path.exists():
        return False
    machine = detect(env.items())
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=machine.label if machine.device_count > 1 else DistributedType.NO,
        mixed_precision=mixed_precision.lower(),
        use_cpu=not machine.has_accelerator,
        debug=False,
        num_processes=max(1, machine.device_count),
    )
    config.to_json_file(path)
    return path


def default_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config default`."""
    made = add_subcommand(parser, parents, "default", description, default_config_command)
    made.add_argument(
        *spellings("--config_file"),
        default=default_json_config_file,
        dest="save_location",
        help="Where to write the file; the default place is the cache folder of Hugging Face.",
    )
    made.add_argument(
        *spellings("--mixed_precision"), choices=PRECISIONS[:3], default="no", help="Number format of training."
    )
    return made


def default_config_command(args: argparse.Namespace) -> None:
    """Write the file and say where it is."""
    written = write_basic_config(args.mixed_precision, args.save_location)
    if written:
        print(f"The options of this machine are in {written}")
    else:
        print(f"There is a file already, left as it is: {args.save_location}. Remove it first, or pass --config_file.")
