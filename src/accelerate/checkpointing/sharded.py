"""Folders of torch's distributed checkpoint: read from the files alone on any number of processes, or merged into one file."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate._base.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate._base.untrusted import shown
from accelerate.checkpointing import torch_files
from accelerate.offload.safetensors_format import write_safetensors
from accelerate.runtime import current
from accelerate.runtime.atomic import atomic_file
from accelerate.runtime.process_control import barrier

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
"""The file that says what is in such a folder and where."""
_SHOWN = 6


def is_sharded(folder: Path) -> bool:
    """Return whether a folder was written by torch's distributed checkpoint."""
    return (folder / METADATA).is_file()


@dataclass(frozen=True)
class ShardFolder:
    """A folder of torch's distributed checkpoint, which any number of processes can read.

    Args:
        allows_pickle: Values that are no tensors may run code while they are read: only if somebody asked for it by name.
    """

    path: Path
    allows_pickle: bool = field(default_factory=lambda: torch_files.allows_pickle({}))

    @cached_property
    def metadata(self) -> Metadata:
        """Return what is in the folder, read once.

        Raises:
            CheckpointError: If it is no such folder, or its description cannot be read.
        """
        from accelerate.checkpointing.shard_reader import read_description

        if not is_sharded(self.path):
            raise CheckpointError(
                f"{str(self.path)!r} holds no shards: there is no {METADATA!r} in it. Give the folder that holds it, such as "
                "'pytorch_model_fsdp_0' inside a checkpoint."
            )
        return read_description(self.path / METADATA)

    @cached_property
    def optimizer_outline(self) -> dict[str, Any]:
        """Return the state of the optimizer in the folder, read once; tensors of parameters are on the meta device.

        Raises:
            CheckpointError: If values cannot be read.
        """
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entries = self.metadata.state_dict_metadata
        paths = self.metadata.planner_data or {}
        outline: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and paths[key][1] != "param_groups"
        }
        outline |= self.read([key for key in entries if key not in outline])
        return {"state": {}, **unflatten({key: paths[key][1:] for key in outline}, outline)}

    def load_into(self, state: dict[str, Any], *, flat: bool = False) -> None:
        """Fill the tensors of a state dict, and replace its other values; no rank waits for another.

        Args:
            flat: The names are those of the folder's description.

        Raises:
            CheckpointError: If an entry is not there, has another shape, cannot be read, or would run code.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import load

        from accelerate.checkpointing.shard_reader import ShardPlanner, ShardReader

        reader = ShardReader(self.path, self.metadata, is_trusted=self.allows_pickle)
        kind = DefaultLoadPlanner if self.allows_pickle else ShardPlanner
        planner = kind(flatten_state_dict=not flat, flatten_sharded_tensors=not flat)
        try:
            with without_warnings_of_torch():
                load(state, storage_reader=reader, planner=planner, no_dist=True)
        except CheckpointError:
            raise
        except (CheckpointException, RuntimeError, ValueError, OSError) as error:
            reasons = [reason for reason, _ in getattr(error, "failures", {}).values()] or [error]
            if isinstance(reasons[0], CheckpointError):
                raise CheckpointError(f"{str(self.path)!r} cannot be loaded: {reasons[0]}") from error
            text = str(reasons[0]).strip().splitlines()
            raise CheckpointError(
                f"The shards in {str(self.path)!r} do not fit what is loaded from them, or are broken: "
                f"{text[0] if text else error!r}. Build the model as it was when the checkpoint was saved."
            ) from error

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return some entries in host memory, by the names that the description has for them.

        Raises:
            CheckpointError: If they cannot be read.
        """
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        state: dict[str, Any] = {}
        try:
            for key in keys:
                entry = self.metadata.state_dict_metadata[key]
                state[key] = None
                if isinstance(entry, TensorStorageMetadata):
                    # Of parts that overlap, some are missing: what was in memory before is nobody's business.
                    state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        except RuntimeError as error:
            raise CheckpointError(
                f"The tensors in {str(self.path)!r} have no room in the memory here ({str(error).splitlines()[0]}). Load "
                "them in shards, on more processes, or use another checkpoint."
            ) from error
        self.load_into(state, flat=True)
        return state

    def read_whole(self) -> dict[str, Any]:
        """Return everything in host memory, in the structure that was saved."""
        flat = self.read(self.metadata.state_dict_metadata)
        paths: Mapping[str, tuple[Any, ...]] = self.metadata.planner_data or {}
        return unflatten({key: paths.get(key, (key,)) for key in flat}, flat)


@contextmanager
def without_warnings_of_torch() -> Iterator[None]:
    """Keep torch's distributed checkpoint from warnings that nobody can act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        # About a function that torch 2.9 and 2.10 call themselves.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield


@contextmanager
def written_by_torch() -> Iterator[None]:
    """Let torch's distributed checkpoint write; what it raises is no `Exception`, and nobody would catch it.

    Raises:
        CheckpointError: If a rank could not write its shards; all ranks raise it.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with without_warnings_of_torch():
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(
            f"The shards of rank {rank} could not be written ({type(cause).__name__}: {cause})."
        ) from error


def unflatten(paths: Mapping[str, tuple[Any, ...]], flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries in the structure that their paths describe, counted ones as lists.

    Raises:
        CheckpointError: If one entry has the place of another.
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        if not _put(tree, paths[key], value):
            raise CheckpointError(f"The entry {shown(key)} has the place of another one. Use another checkpoint.")
    listed: dict[str, Any] = _with_lists(tree)
    return listed


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> bool:
    """Put a value to its place, and return whether that was free."""
    for part in path[:-1]:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            return False
        tree = inner
    return path[-1] not in tree and tree.setdefault(path[-1], value) is value


def _with_lists(value: Any) -> Any:
    """Turn dictionaries that are counted from 0 on into the lists that they were."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(entry) for key, entry in value.items()}
    if items and all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


def by_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state whose parameters have names as one whose parameters are counted, as torch has it."""
    groups: list[dict[str, Any]] = [dict(group) for group in state["param_groups"]]
    held: Mapping[Any, Any] = state["state"]
    if not any(isinstance(name, str) for group in groups for name in group["params"]):
        return {"state": dict(held), "param_groups": groups}
    positions: dict[str, int] = {}
    for group in groups:
        for name in group["params"]:
            positions.setdefault(name, len(positions))
        group["params"] = [positions[name] for name in group["params"]]
    counted = {positions[name]: entry for name, entry in held.items() if name in positions}
    return {"state": counted, "param_groups": groups}


class WholeTensors:
    """The tensors of a folder, brought together a batch at a time as they are asked for in order.

    Args:
        folder: A folder of torch's distributed checkpoint.
        batch_bytes: How much is held in memory at once; one tensor that is larger is held alone.
    """

    def __init__(self, folder: Path, batch_bytes: int = 2**29) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.folder = ShardFolder(folder)
        self.batch_bytes = batch_bytes
        metadata = self.folder.metadata
        paths: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
        self.keys: dict[str, str] = {}
        """Name of a weight -> its name in the folder."""
        self.shapes: dict[str, torch.Tensor] = {}
        """Name of a weight -> a tensor without memory of its shape and dtype."""
        for key, entry in metadata.state_dict_metadata.items():
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
        found = self.folder.read([self.keys[name] for name in names]) if names else {}
        for name in names:
            yield name, found.pop(self.keys[name])


def merge_fsdp_weights(
    checkpoint_dir: str | PathLike[str],
    output_path: str | PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the shards of a model as one file that any program can load.

    In a program with several processes all of them may call it; the first one works.

    Args:
        checkpoint_dir: A folder of shards, such as `pytorch_model_fsdp_0` in a checkpoint, or a checkpoint with one
            such folder.
        output_path: The folder to write to.
        safe_serialization: Write `model.safetensors`, tensor by tensor; otherwise `pytorch_model.bin`, which takes the
            memory of the whole model.
        remove_checkpoint_dir: Delete the shards after that.

    Raises:
        ConfigurationError: If there are no shards in the folder.
    """
    started = current.active()
    try:
        if started is None or started.rank == 0:
            _merge(Path(checkpoint_dir), Path(output_path), safe_serialization, remove_checkpoint_dir)
    finally:
        if started is not None:
            barrier()


def _merge(folder: Path, target: Path, safe_serialization: bool, remove: bool) -> None:
    source = find_shards(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = WholeTensors(source)
    if safe_serialization:
        with atomic_file(target / SAFE_WEIGHTS_NAME) as partial, partial.open("wb") as file:
            write_safetensors(file, tensors.shapes, {"format": "pt"}, tensors.in_order)
    else:
        with atomic_file(target / WEIGHTS_NAME) as partial, partial.open("wb") as file:
            torch.save(dict(tensors.in_order(tensors.shapes)), file)
    if remove:
        shutil.rmtree(source)


def find_shards(folder: Path) -> Path:
    """Return the folder of the shards of a model: the one given, or the only one of a checkpoint.

    Raises:
        ConfigurationError: If there is none, or several.
    """
    if is_sharded(folder):
        return folder
    if not folder.is_dir():
        raise ConfigurationError(
            f"There is no folder {str(folder)!r}, so there are no shards to merge. Give the folder that holds "
            f"{METADATA!r}, such as 'pytorch_model_fsdp_0' in a checkpoint."
        )
    inside = sorted(entry for entry in folder.iterdir() if entry.is_dir() and is_sharded(entry))
    models = [entry for entry in inside if not entry.name.startswith("optimizer")]
    if len(models) == 1:
        return models[0]
    shown = ", ".join(repr(str(entry)) for entry in (models or inside)[:_SHOWN])
    what = "several models are in it" if models else f"there is no {METADATA!r} in it"
    raise ConfigurationError(
        f"{str(folder)!r} is not the folder of one model's shards: {what}. "
        + (f"Give one of {shown}." if shown else "Give a folder that was saved with SHARDED_STATE_DICT.")
    )
