"""Read folders of torch's distributed checkpoint from the files alone, on any number of processes."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate._base.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
"""The file that says what is in such a folder and where."""


def is_sharded(folder: Path) -> bool:
    """Return whether a folder was written by torch's distributed checkpoint."""
    return (folder / METADATA).is_file()


def read_metadata(folder: Path) -> Metadata:
    """Return what is in a folder.

    Raises:
        CheckpointError: If it is no such folder, or its description cannot be read.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        return FileSystemReader(folder).read_metadata()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{str(folder)!r} holds no shards: there is no {METADATA!r} in it. Give the folder that holds it, such as "
            "'pytorch_model_fsdp_0' inside a checkpoint."
        ) from error
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError) as error:
        raise CheckpointError(
            f"{str(folder / METADATA)!r} cannot be read ({type(error).__name__}: {error}), so it is probably broken. "
            "Use another checkpoint."
        ) from error


def load_into(state: dict[str, Any], folder: Path) -> None:
    """Fill the tensors of a state dict from a folder, and replace its other values; no rank waits for another.

    Raises:
        CheckpointError: If an entry is not there, has another shape, or cannot be read.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with without_group_warning():
            load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        reasons = list(getattr(error, "failures", {}).values())
        text = str(reasons[0][0] if reasons else error).strip().splitlines()
        raise CheckpointError(
            f"The shards in {str(folder)!r} do not fit what is loaded from them, or are broken: "
            f"{text[0] if text else error!r}. Build the model as it was when the checkpoint was saved."
        ) from error


@contextmanager
def without_group_warning() -> Iterator[None]:
    """Keep torch from warning that it works without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def read_whole(folder: Path) -> dict[str, Any]:
    """Return everything that is in a folder, whole and in host memory, in the structure that was saved."""
    metadata = read_metadata(folder)
    flat = read_entries(folder, metadata, metadata.state_dict_metadata)
    paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    return unflatten({key: paths.get(key, (key,)) for key in flat}, flat)


def unflatten(paths: Mapping[str, tuple[Any, ...]], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries in the structure that their paths describe, counted ones as lists."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        _put(tree, paths[key], value)
    listed: dict[str, Any] = _with_lists(tree)
    return listed


def read_entries(folder: Path, metadata: Metadata, keys: Iterable[str]) -> dict[str, Any]:
    """Return some entries of a folder by the names that its description has for them."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = {key: metadata.state_dict_metadata[key] for key in keys}
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in entries.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with without_group_warning():
        load(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    return state


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Turn dictionaries that are counted from 0 on into the lists that they were."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(entry) for key, entry in value.items()}
    if items and all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


class WholeTensors:
    """The tensors of a folder, brought together a batch at a time as they are asked for in order.

    Args:
        folder: A folder of torch's distributed checkpoint.
        batch_bytes: How much is held in memory at once; one tensor that is larger is held alone.
    """

    def __init__(self, folder: Path, batch_bytes: int = 2**29) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.folder = folder
        self.batch_bytes = batch_bytes
        self.metadata = read_metadata(folder)
        paths: Mapping[str, tuple[Any, ...]] = self.metadata.planner_data or {}
        self.keys: dict[str, str] = {}
        """Name of a weight -> its name in the folder."""
        self.shapes: dict[str, torch.Tensor] = {}
        """Name of a weight -> a tensor without memory of its shape and dtype."""
        for key, entry in self.metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                path = paths.get(key, (key,))
                name = ".".join(str(part) for part in (path[1:] if len(path) > 1 else path))
                self.keys[name] = key
                self.shapes[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def in_order(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Return tensors by name, in this order."""
        batch: list[str] = []
        size = 0
        for name in names:
            needed = self.shapes[name].numel() * self.shapes[name].element_size()
            if batch and size + needed > self.batch_bytes:
                yield from self._read(batch)
                batch, size = [], 0
            batch.append(name)
            size += needed
        yield from self._read(batch)

    def _read(self, names: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        found = read_entries(self.folder, self.metadata, [self.keys[name] for name in names]) if names else {}
        for name in names:
            yield name, found.pop(self.keys[name])
