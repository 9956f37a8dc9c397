"""Read folders of torch's distributed checkpoint without running code that their files name."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any, BinaryIO, ClassVar, TypeVar

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
from torch.distributed.checkpoint.planner import ReadItem

from accelerate._base.errors import CheckpointError
from accelerate._base.untrusted import first_line, path_inside, read_limited
from accelerate.checkpointing.torch_files import load, refusal

T = TypeVar("T")
_MOST_BYTES = 2**31
"""The longest description that is read: some hundred bytes for each part of a tensor on each rank."""
_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Under these names before torch 2.4.
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},
}
"""The classes of which a description is made, by module."""


# What pickle itself writes for records, texts, numbers, tuples, lists, dictionaries and sets, in protocols 2 to 5.
_INSTRUCTIONS = "\x80\x95\x93\x94\x8c\x8a\x8f\x90X(.)]}cqrhjtu\x81\x85\x86\x87\x88\x89NbaesRKMJG"


class _Record:
    """What a description has in the place of an object of one of torch's classes: its arguments and its state."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, kind: type[T]) -> T:
        """Return a part of the state."""
        value = self.state[name] if isinstance(self.state, dict) else None
        if type(value) is not kind:
            raise TypeError(f"{name!r} is a {type(value).__name__} instead of a {kind.__name__}")
        return value

    def is_a(self, name: str) -> bool:
        """Return whether it stands for an object of a class of this name."""
        return type(self).__name__ == name


class _DescriptionUnpickler(pickle._Unpickler):
    """Read a description as records, and refuse everything else: no class of torch is touched, and nothing is called.

    The one written in Python: a few bytes make that written in C ask for gigabytes.
    """

    dispatch: ClassVar = {ord(code): pickle._Unpickler.dispatch[ord(code)] for code in _INSTRUCTIONS}

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        plain = {
            ("torch", "Size"): tuple,
            ("torch.serialization", "_get_layout"): str,
            ("collections", "OrderedDict"): dict,
            ("builtins", "set"): set,
        }
        self._known: dict[tuple[str, str], Any] = {**plain}
        self._known |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
        # Where the writer had the folder: only a text, which means nothing here, of any system and any Python.
        paths = ((module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows"))
        self._known |= dict.fromkeys(paths, PurePath)
        # Classes of this reading alone: whatever a file does to them ends with it.
        self._known |= {
            (module, name): type(name, (_Record,), {}) for module, names in _RECORDS.items() for name in names
        }

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return what stands for a class."""
        try:
            return self._known[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module_name}.{global_name}") from None


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
        return _as_metadata(_DescriptionUnpickler(BytesIO(read_limited(path, _MOST_BYTES))).load())
    except pickle.UnpicklingError as error:
        raise CheckpointError(refusal(path, error)) from error
    except Exception as error:  # whatever broken bytes make of records
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({type(error).__name__}: {first_line(error)}), so it is probably broken. Use "
            "another checkpoint."
        ) from error


def _as_metadata(found: Any) -> Metadata:
    if not isinstance(found, _Record) or not found.is_a("Metadata"):
        raise TypeError(f"it holds a {type(found).__name__}")
    entries = {_text(key): _as_entry(entry) for key, entry in found.field("state_dict_metadata", dict).items()}
    locations = {_as_index(key): _as_location(place) for key, place in found.field("storage_data", dict).items()}
    paths = found.state.get("planner_data")
    if paths is not None:
        paths = {
            _text(key): tuple(_key(part) for part in path) for key, path in found.field("planner_data", dict).items()
        }
    return Metadata(entries, planner_data=paths, storage_data=locations)


def _as_entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.is_a("BytesStorageMetadata"):
        return BytesStorageMetadata()
    dtype, *_ = entry.state["properties"].state
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype is {dtype!r}")
    chunks = [
        ChunkStorageMetadata(_size(chunk.state["offsets"]), _size(chunk.state["sizes"]))
        for chunk in entry.field("chunks", list)
    ]
    return TensorStorageMetadata(TensorProperties(dtype), _size(entry.state["size"]), chunks)


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
    if not isinstance(value, tuple):
        raise TypeError(f"a size is {value!r}")
    return torch.Size(map(_count, value))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


def _key(value: Any) -> str | int:
    return value if type(value) is int else _text(value)


class ShardReader(FileSystemReader):
    """Read a folder of which nobody knows who wrote it.

    Args:
        description: What is in it.
    """

    def __init__(self, path: Path, description: Metadata) -> None:
        super().__init__(path)
        self.description = description

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description of the folder."""
        return self.description


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
