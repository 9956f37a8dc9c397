"""`accelerate merge-weights`: bring the shards of a model together in one file."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from accelerate.commands import command_parser, run_as_program
from accelerate.config.cli import spellings

__all__ = ["description", "main", "merge_command", "merge_command_parser"]

description = (
    "Merge the shards of a model that was saved under FSDP with SHARDED_STATE_DICT into one file. "
    "Only the files are needed: no accelerator, and not the number of processes that saved them."
)


def merge_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate merge-weights`."""
    parser = command_parser("merge-weights", subparsers, description=description)
    parser.add_argument(
        "checkpoint_directory", help="The folder of the shards (pytorch_model_fsdp_0), or the checkpoint that it is in."
    )
    parser.add_argument("output_path", help="The folder to write to.")
    parser.add_argument(
        *spellings("--unsafe_serialization"),
        action="store_true",
        help="Write pytorch_model.bin with torch.save instead of model.safetensors.",
    )
    parser.add_argument(
        *spellings("--remove_checkpoint_dir"), action="store_true", help="Delete the shards when they are merged."
    )
    parser.set_defaults(func=merge_command)
    return parser


def merge_command(args: argparse.Namespace) -> None:
    """Merge, and say where the file is."""
    from accelerate.checkpointing.sharded import merge_fsdp_weights

    merge_fsdp_weights(
        args.checkpoint_directory, args.output_path, not args.unsafe_serialization, args.remove_checkpoint_dir
    )
    sys.stdout.write(f"The weights are in {args.output_path}.\n")


def main() -> None:
    """Run the program `accelerate-merge-weights`."""
    run_as_program("merge-weights")


if __name__ == "__main__":
    main()
