"""The weight files of a model, found in a folder or through an index: of shards, or of an offload folder.

This module is imported where torch is not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from accelerate._base.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate._base.errors import ConfigurationError, MissingWeightsError
from accelerate._base.untrusted import (
    can_be_path,
    escaping_errors,
    first_line,
    is_shape,
    is_utf8,
    is_whole,
    parse_json,
    path_inside,
    read_limited,
    shown,
)
from accelerate.offload.torch_format import check_torch_file, sparse_checked

INDEX_SUFFIX = ".index.json"
_OFFLOAD_INDEX = "index.json"
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


def checkpoint_files(checkpoint: str | os.PathLike[str]) -> list[Path]:
    """Return the files to load of a checkpoint: a weights file, an index of shards, or a folder with one of these.

    Raises:
        ConfigurationError: If there is none, or the folder has several to choose from.
    """
    path = Path(checkpoint)
    if path.is_file():
        return index_shards(path) if path.suffix == ".json" else [path]
    if not path.is_dir():
        raise ConfigurationError(
            f"There is no checkpoint at {str(path)!r}: it is neither a file nor a folder. "
            "Give a weights file, an index of shards, or the folder that holds them."
        )
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        if (path / name).is_file():
            return [path / name]
    indexes = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) == 1:
        return index_shards(indexes[0])
    raise ConfigurationError(
        f"The folder {str(path)!r} holds {len(indexes)} index files and neither {WEIGHTS_NAME} nor "
        f"{SAFE_WEIGHTS_NAME}, so it does not say what to load. Give the path of the file or index itself."
    )


def index_shards(index_file: Path) -> list[Path]:
    """Return the files that an index names.

    Raises:
        ConfigurationError: If it is no index, or names a file outside of its folder.
    """
    index = read_json(index_file, "an index of shards")
    weight_map = index.get("weight_map", index)
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigurationError(
            f"{str(index_file)!r} is not an index of shards: 'weight_map' must map names of tensors to names of files. "
            "Give the folder of a model, or a weights file."
        )
    origin = f"The index {str(index_file)!r}"
    return [path_inside(index_file.parent, name, origin) for name in sorted(set(weight_map.values()))]


def _present_shards(index_file: Path) -> list[Path]:
    shards = index_shards(index_file)
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise MissingWeightsError(
            f"The index {str(index_file)!r} names {missing[0]!r}, which is not beside it ({len(missing)} of "
            f"{len(shards)} shards are missing). Download the folder again."
        )
    return shards


def load_torch(path: Path, map_location: str) -> tuple[Any, bool]:
    """Return what a file holds that `torch.save` wrote, whose code is never run, and whether its tensors are mapped.

    Raises:
        ConfigurationError: If the file is missing or broken, holds what only code could make, or is packed.
    """
    import torch

    try:
        # Only the zip format, which torch has written since 1.6, can be mapped instead of read whole.
        mapped = check_torch_file(path) and is_utf8(path)
        with sparse_checked(map_location), escaping_errors(), ExitStack() as opened:
            # torch opens no paths that are not UTF-8.
            source = path if is_utf8(path) else opened.enter_context(path.open("rb"))
            return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped), mapped
    except ConfigurationError:
        raise
    except FileNotFoundError as error:
        raise MissingWeightsError(
            f"The weights file {str(path)!r} does not exist. Download or save the checkpoint again."
        ) from error
    except Exception as error:  # whatever torch's readers, and those below them, make of broken bytes
        raise ConfigurationError(
            f"{str(path)!r} cannot be read as weights that torch saved ({first_line(error)}): it is cut off, or not such a "
            "file. Save or download it again, or give a file with a dictionary of tensors, or one in the safetensors format."
        ) from error


def read_json(path: Path, expected: str = "a JSON object") -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Args:
        expected: What the file should be, for the message.

    Raises:
        ConfigurationError: If it is not JSON, or not an object.
    """
    why = ""
    try:
        value = parse_json(read_limited(path))
    except ConfigurationError:
        raise
    except ValueError as error:
        value, why = None, f" ({first_line(error)})"
    if isinstance(value, dict):
        return value
    why = why or f", not {type(value).__name__!r}"
    raise ConfigurationError(
        f"{str(path)!r} cannot be read: {expected} is expected in it{why}. Save or download it again, or give another "
        "file."
    )


# --- the index of an offload folder ------------------------------------------------------------------------------------


def raw_path(folder: str | os.PathLike[str], weight_name: str) -> Path:
    """Return the file of a folder that holds the bytes of one weight.

    Raises:
        ConfigurationError: If the name leads out of the folder.
    """
    return path_inside(Path(folder), f"{weight_name}.dat", f"The weight {shown(weight_name)}")


def read_offload_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the entries of a folder's index, which point at files in the folder, or where this library let them point.

    Raises:
        ConfigurationError: If it is no index, or one that somebody else wrote and that points out of the folder.
    """
    index = _read_entries(folder)
    for name, entry in index.items():
        file = entry.get("safetensors_file")
        if file is None or ("modified" in entry and Path(file).is_absolute() and can_be_path(file)):
            continue
        inside = _name_inside(file, folder)
        if inside is None:
            raise ConfigurationError(
                f"The index {str(Path(folder) / _OFFLOAD_INDEX)!r} points at {shown(file)} for {shown(name)}, which is "
                "outside of its folder, and does not say what that file was like: the index was not written here. Load "
                "the checkpoint again with this offload_folder, or, if you trust the index, read it and pass index=... ."
            )
        index[name] = {**entry, "safetensors_file": str(Path(folder) / inside)}
    return index


def _read_entries(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the entries of a folder's index as they are, if each has the form of one."""
    path = Path(folder) / _OFFLOAD_INDEX
    index = read_json(path, "an index of offloaded weights")
    for name, entry in index.items():
        if not isinstance(entry, dict) or not (_is_pointer(entry) if "safetensors_file" in entry else _is_raw(entry)):
            raise ConfigurationError(
                f"The index {str(path)!r} says {shown(entry)} of {shown(name)}, which is neither a dtype with a shape nor a "
                "place in a safetensors file. Write the folder again from the checkpoint."
            )
    return index


def _is_raw(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("dtype"), str) and is_shape(entry.get("shape"))


def _is_pointer(entry: Mapping[str, Any]) -> bool:
    texts = [entry[key] for key in ("safetensors_file", "weight_name", "dtype") if key in entry]
    numbers = [entry.get(key, 0) for key in ("size", "modified")]
    return all(isinstance(text, str) for text in texts) and all(map(is_whole, numbers))


def _name_inside(file: str, folder: str | os.PathLike[str]) -> str | None:
    """Return the name that a file has in a folder; None if it lies elsewhere. A relative path begins in the folder."""
    path, root = Path(file), Path(folder).absolute()
    try:
        name = path.relative_to(root) if path.is_absolute() else path
        path_inside(root, name.as_posix(), "The index")
    except ValueError:
        return None
    return name.as_posix()


def _file_of(entry: Mapping[str, Any]) -> str | None:
    file = entry.get("safetensors_file")
    return None if file is None else os.fspath(file)


def _noted(file: str | None, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what an index on the disk says of a safetensors file; nothing for raw files."""
    if file is None:
        return {}
    path = Path(file).absolute()
    if _name_inside(str(path), folder) is not None or not path.is_file():
        return {"safetensors_file": str(path)}
    status = path.stat()
    return {"safetensors_file": str(path), "size": status.st_size, "modified": status.st_mtime_ns}


def has_offload_index(folder: str | os.PathLike[str] | None) -> bool:
    """Return whether a folder holds offloaded weights."""
    return folder is not None and (Path(folder) / _OFFLOAD_INDEX).is_file()


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to the index of a folder; nothing happens for an empty index.

    An entry that points at a file elsewhere notes what that file is like: who has not seen it cannot write such an entry.
    """
    if not index:
        return
    merged = _read_entries(offload_folder) if has_offload_index(offload_folder) else {}
    # Each file is looked at once.
    noted = {file: _noted(file, offload_folder) for file in {_file_of(entry) for entry in index.values()}}
    merged.update({name: {**entry, **noted[_file_of(entry)]} for name, entry in index.items()})
    from accelerate.runtime.atomic import atomic_file  # slow to load for who looks at files only

    with atomic_file(Path(offload_folder) / _OFFLOAD_INDEX, synced=False) as partial:
        partial.write_text(json.dumps(merged, indent=2), encoding="utf-8")


def check_noted(path: str | os.PathLike[str], entry: Mapping[str, Any]) -> None:
    """Refuse a file that is not as an index on the disk says it was."""
    with suppress(OSError):  # a file that is not there is told by whoever opens it
        status = Path(path).stat()
        if entry.get("modified", status.st_mtime_ns) != status.st_mtime_ns or (
            entry.get("size", status.st_size) != status.st_size
        ):
            raise ConfigurationError(
                f"The weights file {os.fspath(path)!r} is not the one that the index of the offload folder was written for: "
                "its size or its time of change is another. Load the checkpoint again with this offload_folder."
            )
