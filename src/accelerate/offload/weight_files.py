"""The files of a checkpoint: found, opened without reading them, and read weight by weight."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from accelerate._base.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate._base.errors import ConfigurationError
from accelerate.collectives.base import Communicator
from accelerate.offload.mapped import SafetensorsFile
from accelerate.offload.places import DISK, HOST, META, Place, as_device, lookup

FilePath = str | os.PathLike[str]


class Shape(NamedTuple):
    """What is known of a weight without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Weights(Protocol):
    """Weights of one file, each read when it is asked for."""

    path: Path

    def names(self) -> list[str]:
        """Return the names in the file."""

    def shape(self, name: str) -> Shape:
        """Return shape and dtype of one weight, without reading it."""

    def in_place(self, name: str) -> bool:
        """Return whether an index may point at the weight in this very file."""

    def read(self, name: str, device: torch.device) -> Any:
        """Return one weight on a device."""


class _Safetensors:
    """The weights of a safetensors file; on the CPU they are its own pages, until they are written to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SafetensorsFile(path)

    def names(self) -> list[str]:
        return list(self._file.layout)

    def shape(self, name: str) -> Shape:
        stored = self._file.find(name)
        if stored.dtype is None:
            return Shape(stored.shape, self._file.read(name).dtype)
        return Shape(stored.shape, stored.dtype)

    def in_place(self, name: str) -> bool:
        return True

    def read(self, name: str, device: torch.device) -> Any:
        if device == META:
            return torch.empty(*self.shape(name)[:1], dtype=self.shape(name).dtype, device=META)
        return self._file.read(name).to(device)


class _Torch:
    """The weights of a file that `torch.save` wrote, whose code is never run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Only the zip format, which torch has written since 1.6, can be mapped instead of read whole.
        self._mapped = path.is_file() and zipfile.is_zipfile(path)
        try:
            self._state: dict[str, Any] = torch.load(path, map_location=HOST, weights_only=True, mmap=self._mapped)
        except (OSError, EOFError, RuntimeError) as error:
            raise ConfigurationError(
                f"The weights file {str(path)!r} cannot be read ({str(error).splitlines()[0] or type(error).__name__}): "
                "it is missing, cut off, or not a file that torch saved. Save or download it again."
            ) from error

    def names(self) -> list[str]:
        return list(self._state)

    def shape(self, name: str) -> Shape:
        return Shape(tuple(self._state[name].shape), self._state[name].dtype)

    def in_place(self, name: str) -> bool:
        return False

    def read(self, name: str, device: torch.device) -> Any:
        value = self._state[name]
        if not isinstance(value, torch.Tensor):
            return value
        # A copy, because `torch.save` to the same path would pull the pages away under the model.
        return value.clone() if device.type == HOST and self._mapped else value.to(device)


class Received:
    """The weights of a file that the first process reads and sends to all others.

    All processes ask for the same weights in the same order.
    """

    def __init__(self, path: Path, group: Communicator) -> None:
        self.path, self._group = path, group
        self._file = open_weights(path) if group.rank == 0 else None
        listed: list[Any] = [None]
        if self._file is not None:
            listed = [{name: self._file.shape(name) for name in self._file.names()}]
        group.broadcast_objects(listed)
        self._shapes: dict[str, Shape] = listed[0]

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def in_place(self, name: str) -> bool:
        return False

    def read(self, name: str, device: torch.device) -> Any:
        shape, dtype = self._shapes[name]
        if self._file is not None:
            value = self._file.read(name, as_device(HOST)).contiguous()
        else:
            value = torch.empty(shape, dtype=dtype)
        return self._group.broadcast(value).to(device)


def open_weights(path: FilePath) -> Weights:
    """Open a `.safetensors` file, or a file that `torch.save` wrote, whose code is never run.

    Raises:
        ConfigurationError: If the file is missing or broken, or a safetensors file was not written for torch.
    """
    file = Path(path)
    return _Safetensors(file) if file.suffix == ".safetensors" else _Torch(file)


def load_state_dict(checkpoint_file: FilePath, device_map: Mapping[str, Place] | None = None) -> dict[str, Any]:
    """Return the weights of a file.

    Args:
        device_map: Where each module's weights go; those for the disk, and all without a map, go to the CPU.

    Raises:
        ConfigurationError: If the file is missing or broken, or a safetensors file was not written for torch.
    """
    weights = open_weights(checkpoint_file)
    return {name: weights.read(name, _reading_device(device_map, name)) for name in weights.names()}


def _reading_device(device_map: Mapping[str, Place] | None, name: str) -> torch.device:
    place = lookup(device_map, name) if device_map else None
    return as_device(HOST if place is None or place == DISK else place)


def checkpoint_files(checkpoint: FilePath) -> list[Path]:
    """Return the files of a checkpoint, which is a weights file, an index of shards, or a folder with one of these.

    Raises:
        ConfigurationError: If there is none, or the folder has several to choose from.
    """
    path = Path(checkpoint)
    if path.is_file():
        return _shards(path) if path.suffix == ".json" else [path]
    if not path.is_dir():
        raise ConfigurationError(
            f"There is no checkpoint at {str(checkpoint)!r}: it is neither a file nor a folder. "
            "Give a weights file, an index of shards, or the folder that holds them."
        )
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        if (path / name).is_file():
            return [path / name]
    indices = sorted(path.glob("*.index.json"))
    if len(indices) == 1:
        return _shards(indices[0])
    raise ConfigurationError(
        f"The folder {str(checkpoint)!r} holds {len(indices)} index files and neither {WEIGHTS_NAME} nor "
        f"{SAFE_WEIGHTS_NAME}, so it does not say what to load. Give the path of the file or index itself."
    )


def _shards(index_file: Path) -> list[Path]:
    index = json.loads(index_file.read_text(encoding="utf-8"))
    names = sorted(set(index.get("weight_map", index).values()))
    return [index_file.parent / name for name in names]
