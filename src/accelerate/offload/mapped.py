"""Weight files as memory: mapped privately, so that their tensors are the pages of the file until somebody writes to them."""

from __future__ import annotations

import errno
import math
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.offload.places import HOST
from accelerate.offload.safetensors_format import read_header, torch_dtype

FilePath = str | os.PathLike[str]

ALIGNMENT = 64
"""What torch's own allocator gives. Products with a single row may sum in another order at other addresses."""
SMALL = 2**20
"""Tensors up to this size are copied where the file does not align them; larger ones are used as they lie."""
_OWN_MAPPING = 2**20
# Linux; Python has a name for it from 3.13 on. Without it a file larger than the memory may not be mapped for writing.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies in a file, and what it is."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None for a dtype of the format that torch does not have."""
    nbytes: int


class MappedFile:
    """Map a file of weights, and notice when somebody else changes, removes or replaces it.

    The mapping is private: a write to a tensor of it stays in this process.

    Raises:
        ConfigurationError: If the file is not there.
    """

    def __init__(self, path: FilePath) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._identity = _identity(os.fstat(file.fileno()))
                self.size = self._identity[1]
                self._map(file.fileno())
        except OSError as error:
            raise ConfigurationError(
                f"The weights file {str(path)!r} cannot be opened ({error.strerror or error}), and the model reads "
                "weights from it. Put it back, or load the checkpoint again from where it is now."
            ) from error

    def _map(self, descriptor: int) -> None:
        self._memory = _private_mapping(descriptor, self.size) if self.size else None

    def check(self) -> None:
        """Raise an error if the file is not what was mapped any more.

        Raises:
            UsageError: If it was written to, cut off, removed, or replaced by another one under its name. The pages of
                a file that is gone would still be there on some systems, and not on network file systems: a model
                either has its file or says that it has not.
        """
        try:
            now = _identity(os.stat(self.path))  # noqa: PTH116 - called for every module that runs
        except OSError as error:
            self._complain(f"is not there any more ({error.strerror or error})")
        if now == self._identity:
            return
        if now[0] != self._identity[0]:
            self._complain("was replaced by another file")
        self._complain(
            f"was changed from {self.size} to {now[1]} bytes" if now[1] != self.size else "was changed in place"
        )

    def _complain(self, what: str) -> NoReturn:
        raise UsageError(
            f"The weights file {str(self.path)!r} {what} while a model uses it, so it does not hold the weights of the "
            "model. Load the checkpoint again, keep its files for as long as the model runs, and save new ones under "
            "another name."
        )

    def tensor(self, stored: Stored) -> torch.Tensor:
        """Return a tensor of the file: its own pages, unless it is small and not aligned."""
        if stored.dtype is None:
            raise ConfigurationError(
                f"{str(self.path)!r} holds a tensor of a dtype that torch {torch.__version__} does not have. "
                "Save the checkpoint in another dtype."
            )
        count = math.prod(stored.shape)
        if count == 0 or self._memory is None:
            return torch.empty(stored.shape, dtype=stored.dtype)
        # A storage for each tensor: one for the whole file would make all its tensors look tied to each other.
        with torch.inference_mode(False):
            if stored.start % stored.dtype.itemsize:
                raw = torch.frombuffer(self._memory, dtype=torch.uint8, count=stored.nbytes, offset=stored.start)
                return raw.clone().view(stored.dtype).reshape(stored.shape)
            found = torch.frombuffer(self._memory, dtype=stored.dtype, count=count, offset=stored.start)
            found = found.reshape(stored.shape)
            return found.clone() if is_copied(stored) else found


def is_copied(stored: Stored) -> bool:
    """Return whether a tensor of a file is taken as a copy, because it is not aligned and either small or unusable."""
    itemsize = stored.dtype.itemsize if stored.dtype is not None else 1
    return stored.start % itemsize != 0 or (stored.start % ALIGNMENT != 0 and stored.nbytes <= SMALL)


def _identity(status: os.stat_result) -> tuple[tuple[int, int], int, int]:
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns


def _private_mapping(descriptor: int, size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=protection)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=protection)


def memory_for(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor on the CPU whose memory goes back to the system as soon as it is not used.

    What the allocator of the C library gets back it may keep, in one heap for every thread that reads ahead.
    """
    nbytes = shape.numel() * dtype.itemsize
    if nbytes < _OWN_MAPPING:
        return torch.empty(shape, dtype=dtype)
    # Private, as memory of the process: without a word Python maps it shared.
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, nbytes, **private)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2 * _OWN_MAPPING:
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


class SafetensorsFile(MappedFile):
    """Map a safetensors file, and know its tensors by name.

    Raises:
        ConfigurationError: If the file is not there, is cut off, or was not written for torch.
    """

    def __init__(self, path: FilePath) -> None:
        super().__init__(path)
        self._header = read_header(self.path)
        written = self._header.metadata.get("format", "pt")
        if written != "pt":
            raise ConfigurationError(
                f"{str(path)!r} was written for {written!r}, so its tensors may be laid out differently. "
                "Save it again from torch, which writes the metadata {'format': 'pt'}."
            )
        if self._header.file_size > self.size:
            raise ConfigurationError(
                f"The weights file {str(path)!r} is cut off: its header describes {self._header.file_size} bytes, and it "
                f"has {self.size}. Save or download it again."
            )

    @cached_property
    def layout(self) -> dict[str, Stored]:
        """Where each tensor lies."""
        return {name: self._stored(entry) for name, entry in self._header.tensors.items()}

    def _stored(self, entry: dict[str, Any]) -> Stored:
        start, end = entry["data_offsets"]
        dtype = torch_dtype(entry["dtype"])
        return Stored(self._header.data_start + start, tuple(entry["shape"]), dtype, end - start)

    def find(self, name: str) -> Stored:
        """Return where a tensor lies.

        Raises:
            ConfigurationError: If the file has no such tensor.
        """
        if name not in self.layout:
            raise ConfigurationError(
                f"The weights file {str(self.path)!r} has no tensor {name!r}, which an index says is there. "
                "The file belongs to another checkpoint: load the checkpoint again."
            )
        return self.layout[name]

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU."""
        stored = self.find(name)
        if stored.dtype is not None:
            return self.tensor(stored)
        from safetensors import safe_open

        with safe_open(self.path, framework="pt", device=HOST) as weights:
            tensor: torch.Tensor = weights.get_tensor(name)
        return tensor


class RawFile(MappedFile):
    """Map a file that holds the bytes of one tensor and nothing else.

    Raises:
        ConfigurationError: If the file is not there, or is shorter than the tensor.
    """

    def __init__(self, path: FilePath, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.stored = Stored(0, shape, dtype, math.prod(shape) * dtype.itemsize)
        super().__init__(path)

    def _map(self, descriptor: int) -> None:
        count = math.prod(self.stored.shape)
        if self.size < self.stored.nbytes:
            raise ConfigurationError(
                f"The weights file {str(self.path)!r} is cut off: the index of its folder describes "
                f"{self.stored.nbytes} bytes, and it has {self.size}. Write the folder again from the checkpoint."
            )
        with torch.inference_mode(False):
            if count == 0:  # an empty file cannot be mapped
                self._tensor = torch.empty(self.stored.shape, dtype=self.stored.dtype)
                return
            # torch keeps no descriptor open, of which a folder with a file for each weight would need too many.
            mapped = torch.from_file(os.fspath(self.path), shared=False, size=count, dtype=self.stored.dtype)
            self._tensor = mapped.reshape(self.stored.shape)

    def read(self) -> torch.Tensor:
        """Return the tensor."""
        return self._tensor


@dataclass(frozen=True)
class FoundWeight:
    """A stored weight on the CPU, and where it comes from.

    Args:
        dtype: What it is to be used as, which may differ from what it is stored as.
        file: The file that it lies in; None if it is in memory.
        offset: Where it begins in that file.
        in_place: Whether the tensor is the pages of the file, not a copy of them.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    file: MappedFile | None = None
    offset: int = 0
    in_place: bool = False


class OpenFiles:
    """Keep the weight files that are mapped, each once."""

    def __init__(self) -> None:
        self._files: dict[str, Any] = {}

    def safetensors(self, path: FilePath) -> SafetensorsFile:
        """Return a safetensors file."""
        key = os.fspath(path)
        file: SafetensorsFile | None = self._files.get(key)
        if file is None:
            file = self._files[key] = SafetensorsFile(path)
        return file

    def raw(self, path: FilePath, shape: tuple[int, ...], dtype: torch.dtype) -> RawFile:
        """Return the file of one weight."""
        key = os.fspath(path)
        file: RawFile | None = self._files.get(key)
        if file is None:
            file = self._files[key] = RawFile(path, shape, dtype)
        return file

    def find_in_safetensors(self, path: FilePath, name: str, dtype: torch.dtype | None) -> FoundWeight:
        """Return a weight of a safetensors file.

        Args:
            dtype: What it is to be used as; as it is stored if not given.
        """
        file = self.safetensors(path)
        stored = file.find(name)
        tensor = file.read(name)
        in_place = stored.dtype is not None and not is_copied(stored) and tensor.numel() > 0
        return FoundWeight(tensor, dtype or tensor.dtype, file, stored.start, in_place)

    def find_raw(self, path: FilePath, shape: tuple[int, ...], dtype: torch.dtype) -> FoundWeight:
        """Return the weight of a file of its own."""
        file = self.raw(path, shape, dtype)
        return FoundWeight(file.read(), dtype, file, 0, in_place=file.stored.nbytes > 0)
