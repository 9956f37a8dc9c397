"""Read folders of torch's distributed checkpoint without running code that their files name."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from accelerate._base.errors import CheckpointError
from accelerate._base.untrusted import MOST_LEVELS, check_regular, path_inside, read_limited, shown
from accelerate.checkpointing.torch_files import broken, load, refusal
from accelerate.offload.pickle_records import Name, Record, RecordUnpickler, Tuple, refuse
from accelerate.offload.torch_format import check_saved, sparse_checked

_MOST_BYTES = 2**31
"""The longest description that is read: some hundred bytes for each part of a tensor on each rank."""
_MOST_AXES = 64
_RECORDS = {
    f"{module}.{name}"
    for module, names in {
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        # Under these names before torch 2.4.
        "torch.distributed._shard.sharded_tensor.metadata": ("MEM_FORMAT_ENCODING", "TensorProperties"),
        # Where the writer had the folder, of any system and any Python: it means nothing here.
        "pathlib": ("PosixPath", "WindowsPath"),
        "pathlib._local": ("PosixPath", "WindowsPath"),
        "torch": ("Size",),
        "torch.serialization": ("_get_layout",),
        "collections": ("OrderedDict",),
        "builtins": ("set",),
    }.items()
    for name in names
}
"""The classes of which a description is made."""
# What pickle itself writes for records, texts, numbers, tuples, lists, dictionaries and sets, in protocols 2 to 5.
_INSTRUCTIONS = "\x95\x93\x94\x8c\x90"


class _DescriptionUnpickler(RecordUnpickler):
    """Read a description as records, and refuse everything else."""

    dispatch: ClassVar = {
        **{ord(code): pickle._Unpickler.dispatch[ord(code)] for code in _INSTRUCTIONS},
        **RecordUnpickler.dispatch,
    }

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return what stands for a class."""
        name = super().find_class(module_name, global_name)
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        return name if name in _RECORDS else refuse(name)

    def call(self, name: Name, args: Iterable[Any]) -> Any:
        """Return what stands for the result of a call: plain values as what they are."""
        if name == "collections.OrderedDict":
            return {}
        return Tuple(*args) if name == "torch.Size" else super().call(name, args)


@dataclass(frozen=True)
class ShardLocation:
    """Where the bytes of one entry are, as torch's reader looks for them.

    Args:
        relative_path: The file, in the folder.
        transform_descriptors: How the bytes were transformed when they were written.
    """

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


def read_description(path: Path) -> Metadata:
    """Return what a description says.

    Raises:
        CheckpointError: If it cannot be read, holds something else, or names a file outside of its folder.
    """
    try:
        content = read_limited(path, _MOST_BYTES)
        return _as_metadata(_DescriptionUnpickler(BytesIO(content), len(content)).load())
    except pickle.UnpicklingError as error:
        raise CheckpointError(refusal(path, error)) from error
    except Exception as error:  # whatever broken bytes make of records
        raise CheckpointError(broken(path, error)) from error


def _as_metadata(found: Any) -> Metadata:
    if not isinstance(found, Record) or not found.is_a("Metadata"):
        raise TypeError(f"it holds a {type(found).__name__}")
    entries = {_text(key): _as_entry(entry) for key, entry in found.field("state_dict_metadata", dict).items()}
    locations = {_as_index(key): _as_location(place) for key, place in found.field("storage_data", dict).items()}
    paths = found.state.get("planner_data")
    if paths is not None:
        paths = {_text(key): _as_path(path) for key, path in found.field("planner_data", dict).items()}
    return Metadata(entries, planner_data=paths, storage_data=locations)


def _as_entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.is_a("BytesStorageMetadata"):
        return BytesStorageMetadata()
    dtype, *_ = entry.state["properties"].state
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype is {shown(dtype)}")
    size, chunks = _size(entry.state["size"]), []
    for part in entry.field("chunks", list):
        chunk = ChunkStorageMetadata(_size(part.state["offsets"]), _size(part.state["sizes"]))
        ends = (offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True))
        if any(end > length for end, length in zip(ends, size, strict=True)):
            raise ValueError("a part of a tensor lies outside of it")
        chunks.append(chunk)
    if sum(chunk.sizes.numel() for chunk in chunks) < size.numel():
        raise ValueError(f"parts of a tensor of size {list(size)} are missing")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _as_path(path: Any) -> tuple[str | int, ...]:
    if not isinstance(path, tuple) or not 0 < len(path) <= MOST_LEVELS:
        raise ValueError("the place of an entry is no path")
    return tuple(part if type(part) is int else _text(part) for part in path)


def _as_index(key: Any) -> MetadataIndex:
    offset, index = key.state.get("offset"), key.state.get("index")
    return MetadataIndex(
        key.field("fqn", str), None if offset is None else _size(offset), None if index is None else _count(index)
    )


def _as_location(place: Any) -> ShardLocation:
    name = place.field("relative_path", str)
    path_inside(Path(), name, "It")
    transforms = tuple(map(_text, place.state.get("transform_descriptors", ())))
    return ShardLocation(name, _count(place.state["offset"]), _count(place.state["length"]), transforms)


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or len(value) > _MOST_AXES:
        raise TypeError(f"a size is {shown(value)}")
    return torch.Size(map(_count, value))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{shown(value)} is no size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


class ShardReader(FileSystemReader):
    """Read a folder of which nobody knows who wrote it.

    Args:
        description: What is in it.
        is_trusted: Somebody asked for it by name that files may do what they like.
    """

    def __init__(self, path: Path, description: Metadata, *, is_trusted: bool) -> None:
        super().__init__(path)
        self.folder = path
        self.description = description
        self.is_trusted = is_trusted

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the folder."""
        return self.description

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, if torch can do so without harm.

        Raises:
            CheckpointError: If an entry would take all time or memory to read, or run code.
        """
        if not self.is_trusted:
            places = (self.description.storage_data[item.storage_index] for item in plan.items)
            for name, group in groupby(sorted(places, key=_order), key=lambda place: place.relative_path):
                self._check(self.folder / name, group)
        with sparse_checked():
            return super().read_data(plan, planner)

    def _check(self, path: Path, places: Iterable[ShardLocation]) -> None:
        try:
            if not check_regular(path).st_size:
                raise EOFError("it is empty")
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                for place in places:
                    with memoryview(mapped)[place.offset : place.offset + place.length] as content:
                        check_saved(content)
        except pickle.UnpicklingError as error:
            raise CheckpointError(refusal(path, error)) from error
        except Exception as error:  # whatever broken bytes make the readers of archives and pickles raise
            raise CheckpointError(broken(path, error)) from error


def _order(place: ShardLocation) -> tuple[str, int]:
    return place.relative_path, place.offset


class ShardPlanner(DefaultLoadPlanner):
    """Fill a state dict with tensors, and with other values as far as they are plain data."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Take over a value that is no tensor.

        Raises:
            CheckpointError: If it would run code.
        """
        try:
            plain = load(value, map_location="cpu")
        except pickle.UnpicklingError as error:
            raise CheckpointError(refusal(read_item.storage_index.fqn, error, value)) from error
        # torch unpickles what it gets here, whatever that runs: so it gets bytes that were written here.
        with BytesIO() as written:
            torch.save(plain, written)
            written.seek(0)
            super().load_bytes(read_item, written)
