"""`accelerate to-fsdp2`: rewrite a configuration file for version 2 of FSDP, and say what changes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate._base.untrusted import shown
from accelerate.commands import command_parser
from accelerate.config.cli import spellings
from accelerate.config.file_text import load_text
from accelerate.config.files import place_to_write, write_text

__all__ = [
    "ARGUMENT_KEY_MAPPING",
    "ARGUMENT_VALUE_MAPPING",
    "ConversionStatus",
    "convert_config_to_fsdp2",
    "load_config",
    "to_fsdp2_command",
    "to_fsdp2_command_parser",
]


class OutputFileExistsError(ConfigurationError, FileExistsError):
    """Report a file that would be overwritten without being asked for."""


class ConversionStatus(Enum):
    """Why an option has no counterpart in version 2."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


_SAME = (
    "fsdp_version fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_cpu_ram_efficient_loading fsdp_offload_params "
    "fsdp_ignored_modules fsdp_state_dict_type fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
    "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload"
)
ARGUMENT_KEY_MAPPING: dict[str, str | ConversionStatus] = {
    **{key: key for key in _SAME.split()},
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
}
"""Option of version 1 -> the option of version 2, or why there is none."""

_FREES_WEIGHTS: dict[str, bool] = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}
ARGUMENT_VALUE_MAPPING: dict[str, Mapping[str, bool | str]] = {
    "fsdp_sharding_strategy": _FREES_WEIGHTS,
    "fsdp_reshard_after_forward": _FREES_WEIGHTS,
    "fsdp_state_dict_type": {"LOCAL_STATE_DICT": "SHARDED_STATE_DICT"},
}
"""Option -> value of version 1 -> value of version 2."""

_REASONS = {
    "fsdp_backward_prefetch": "version 2 always fetches the next weights before it computes gradients",
    "fsdp_forward_prefetch": "version 2 fetches ahead by itself, and by hand in the program if that is not enough",
    "fsdp_sync_module_states": "version 2 takes weights from the first rank with fsdp_cpu_ram_efficient_loading",
    "fsdp_use_orig_params": "version 2 always keeps the parameters as they were",
}
_VALUE_NOTES = {
    "LOCAL_STATE_DICT": "version 2 has no files of bare local weights: each process writes its part as a shard, which "
    "loads on any number of processes",
    "NO_SHARD": "version 2 has no form without shards: weights are sharded now, which saves memory and costs "
    "communication. Use distributed_type MULTI_GPU for copies alone",
    "HYBRID_SHARD": "shards inside a machine and copies between machines are asked for in parallelism_config now: set "
    "parallelism_config_dp_shard_size and parallelism_config_dp_replicate_size",
}
_VALUE_NOTES["HYBRID_SHARD_ZERO2"] = _VALUE_NOTES["HYBRID_SHARD"]


def load_config(config_file: str | Path) -> dict[str, Any]:
    """Return what is in a configuration file.

    Raises:
        ConfigurationError: (a ValueError) if it is empty or cannot be read.
    """
    found = load_text(config_file)
    if not found:
        raise ConfigurationError(
            f"The configuration file {str(config_file)!r} is empty, so there is nothing to convert. "
            "Write one with `accelerate config`."
        )
    return found


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration for version 2; one that is for version 2 already comes back as it is, with a warning."""
    converted, notes = _convert(config)
    for note in notes:
        warn_once(note)
    return converted


def _convert(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the new configuration, and a sentence for every change."""
    section: Any = config.get("fsdp_config") or {}
    if not isinstance(section, dict):
        raise ConfigurationError(
            f"fsdp_config: {shown(section)} is a {type(section).__name__}, and it must hold keys of its own. Correct the "
            "file, or make it with `accelerate config`."
        )
    if not section:
        return config, ["There is no fsdp_config in this configuration, so nothing changes."]
    if str(section.get("fsdp_version", 1)) == "2":
        return config, ["This configuration is for version 2 of FSDP already, so nothing changes."]
    new: dict[Any, Any] = {}
    notes: list[str] = []
    for key, value in section.items():
        if key == "fsdp_version":
            continue
        kept = ARGUMENT_KEY_MAPPING.get(key, key)
        if isinstance(kept, ConversionStatus):
            notes.append(f"{key}: {value} is left out: {_REASONS[key]}.")
            continue
        new_value = _value(key, value)
        if (kept, new_value) != (key, value):
            written = str(new_value).lower() if isinstance(new_value, bool) else new_value
            notes.append(f"{key}: {value} becomes {kept}: {written}.")
        note = _VALUE_NOTES.get(str(value).upper())
        if note is not None and key in ARGUMENT_VALUE_MAPPING:
            notes.append(f"Note on {value}: {note}.")
        new[kept] = new_value
    new["fsdp_version"] = 2
    notes.append("fsdp_version becomes 2.")
    return {**config, "fsdp_config": dict(sorted(new.items(), key=lambda entry: str(entry[0])))}, notes


def _value(key: str, value: Any) -> Any:
    names = ARGUMENT_VALUE_MAPPING.get(key)
    if names is None or isinstance(value, bool):
        return value
    # Strategies are also written by their numbers, from 1 on.
    text = str(value).upper()
    by_number = {str(number): name for number, name in enumerate(_FREES_WEIGHTS, start=1)}
    return names.get(by_number.get(text, text), value)


def to_fsdp2_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate to-fsdp2`."""
    description = "Rewrite a configuration file for version 2 of FSDP, and say what changes."
    parser = command_parser("to-fsdp2", subparsers, description=description)
    parser.add_argument(*spellings("--config_file"), required=True, help="The file to convert.")
    parser.add_argument("--overwrite", action="store_true", help="Replace the file that is written to.")
    parser.add_argument(
        *spellings("--output_file"), default=None, help="The file to write; the one converted, with --overwrite."
    )
    parser.set_defaults(func=to_fsdp2_command)
    return parser


def to_fsdp2_command(args: argparse.Namespace) -> None:
    """Convert a file and print a line for every change.

    Raises:
        ConfigurationError: (a ValueError) if the source does not exist (also a FileNotFoundError), the target exists (also
            a FileExistsError), cannot be written, or none was given.
    """
    source = Path(args.config_file)
    config = load_config(source)
    if args.output_file is None and not args.overwrite:
        raise ConfigurationError(
            f"--config_file {str(source)!r} was given and no --output_file, so the file itself would be replaced. "
            "Give --output_file, or --overwrite."
        )
    target = place_to_write(source if args.output_file is None else args.output_file)
    if target.exists() and not args.overwrite:
        raise OutputFileExistsError(
            f"--output_file {str(target)!r} exists already and would be lost. Give another name, or --overwrite."
        )
    converted, notes = _convert(config)
    import yaml

    write_text(target, yaml.safe_dump(converted, sort_keys=True))
    sys.stdout.write("".join(f"- {note}\n" for note in notes) + f"Written to {target}.\n")
