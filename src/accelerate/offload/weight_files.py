"""The weight files of a model: found in a folder, or through an index of shards. It is imported where torch is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate._base.errors import ConfigurationError

INDEX_SUFFIX = ".index.json"
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
# What the Trainer and other programs put beside weights.
_OTHER_FILES = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt"})
_MAIN_NAMES = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")


def is_weight_file(path: Path) -> bool:
    """Return whether a path names weights, or an index of them, by its ending."""
    return path.suffix in _SUFFIXES or path.name.endswith(INDEX_SUFFIX)


def find_weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights of a file, of an index or of a folder; none if a folder has no weights.

    Names are free here: what is only looked at need not be what a model loads.

    Raises:
        ConfigurationError: If a shard that an index names is missing, or the index cannot be read.
    """
    if path.is_file():
        return _present_shards(path) if path.name.endswith(INDEX_SUFFIX) else [path]
    for suffix in _SUFFIXES:
        indexes = sorted(path.glob(f"*{suffix}{INDEX_SUFFIX}"))
        if len(indexes) == 1:
            return _present_shards(indexes[0])
        found = sorted(file for file in path.glob(f"*{suffix}") if file.name not in _OTHER_FILES)
        if len(found) <= 1:
            if found:
                return found
            continue
        for name in _MAIN_NAMES:
            if (path / f"{name}{suffix}").is_file():
                return [path / f"{name}{suffix}"]
        raise ConfigurationError(
            f"The folder {str(path)!r} holds {len(found)} {suffix} files and {len(indexes)} index files, so it does not "
            "say which of them make up one model. Give the path of a file or of an index."
        )
    return []


def index_shards(index_file: Path) -> list[Path]:
    """Return the files that an index names.

    Raises:
        ConfigurationError: If it is no index.
    """
    index = read_json(index_file, "an index of shards")
    weight_map = index.get("weight_map", index)
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigurationError(
            f"{str(index_file)!r} is not an index of shards: 'weight_map' must map names of tensors to names of files. "
            "Give the folder of a model, or a weights file."
        )
    return [index_file.parent / name for name in sorted(set(weight_map.values()))]


def _present_shards(index_file: Path) -> list[Path]:
    shards = index_shards(index_file)
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ConfigurationError(
            f"The index {str(index_file)!r} names {missing[0]!r}, which is not beside it ({len(missing)} of "
            f"{len(shards)} shards are missing). Download the folder again."
        )
    return shards


def read_json(path: Path, expected: str = "a JSON object") -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Args:
        expected: What the file should be, for the message.

    Raises:
        ConfigurationError: If it is not JSON, or not an object.
    """
    why = ""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        value, why = None, f" ({str(error).splitlines()[0].rstrip('.')})"
    if isinstance(value, dict):
        return value
    why = why or f", not {type(value).__name__!r}"
    raise ConfigurationError(
        f"{str(path)!r} cannot be read: {expected} is expected in it{why}. Save or download it again, or give another "
        "file."
    )
