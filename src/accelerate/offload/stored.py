"""Stored tensors, whose bytes are in memory or in mapped files, and loaded tensors, which layers compute with."""

from __future__ import annotations

import errno
import math
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import torch

from accelerate._base import pages
from accelerate._base.errors import ConfigurationError, MissingWeightsError, UsageError
from accelerate._base.untrusted import check_regular, first_line
from accelerate.devices import registry
from accelerate.devices.copy_lane import Arrival, CopyLane
from accelerate.offload.places import HOST, META
from accelerate.offload.safetensors_format import read_header, torch_dtype

FilePath = str | os.PathLike[str]

ALIGNMENT = 64
"""What torch's own allocator gives. Products with a single row may sum in another order at other addresses."""
SMALL = 2**20
"""Tensors up to this size are copied where the file does not align them; larger ones are used as they lie."""
_OWN_MAPPING = 2**20
# Small enough that a thread that reads ahead notices soon that it is not needed any more.
_POPULATE_CHUNK = 32 * 2**20
# Linux; Python has a name for it from 3.13 on. Without it a file larger than the memory may not be mapped for writing.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_NEVER = 1 << 60
_NOT_KNOWN = 1 << 50


class MappedFile:
    """Map a file of weights, and notice when somebody else changes, removes or replaces it.

    The mapping is private: tensors are the pages of the file until somebody writes to them, and a write stays in this
    process.

    Raises:
        MissingWeightsError: If the file does not exist.
        ConfigurationError: If it is a pipe or a device, or cannot be opened.
    """

    def __init__(self, path: FilePath) -> None:
        self.path = Path(path)
        try:
            check_regular(self.path)
            with self.path.open("rb") as file:
                self._identity = _identity(os.fstat(file.fileno()))
                self.size = self._identity[1]
                self._map(file.fileno())
        except OSError as error:
            kind = MissingWeightsError if isinstance(error, FileNotFoundError) else ConfigurationError
            raise kind(
                f"The weights file {str(path)!r} cannot be opened ({error.strerror or error}), and the model reads "
                "weights from it. Put it back, or load the checkpoint again from where it is now."
            ) from error

    def _map(self, descriptor: int) -> None:
        self._memory: mmap.mmap | None = None
        if self.size and not hasattr(mmap, "MAP_PRIVATE"):
            self._memory = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_COPY)
        elif self.size:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            try:
                self._memory = mmap.mmap(descriptor, self.size, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=protection)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                self._memory = mmap.mmap(descriptor, self.size, flags=mmap.MAP_PRIVATE, prot=protection)

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Return a tensor of the file on the CPU: its own pages, unless it is small and not aligned."""
        dtype, count = stored.stored_dtype, math.prod(stored.shape)
        if count == 0 or self._memory is None or dtype is None:
            return torch.empty(stored.shape, dtype=dtype)
        # A storage for each tensor: one for the whole file would make all its tensors look tied to each other.
        with torch.inference_mode(False):
            if stored.offset % dtype.itemsize:
                raw = torch.frombuffer(self._memory, dtype=torch.uint8, count=stored.nbytes, offset=stored.offset)
                return raw.clone().view(dtype).reshape(stored.shape)
            found = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=stored.offset)
            found = found.reshape(stored.shape)
            return found if stored.in_place else found.clone()

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
            self._refuse(f"is not there any more ({error.strerror or error})")
        if now == self._identity:
            return
        if now[0] != self._identity[0]:
            self._refuse("was replaced by another file")
        self._refuse(
            f"was changed from {self.size} to {now[1]} bytes" if now[1] != self.size else "was changed in place"
        )

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"The weights file {str(self.path)!r} {what} while a model uses it, so it does not hold the weights of the "
            "model. Load the checkpoint again, keep its files for as long as the model runs, and save new ones under "
            "another name."
        )


def _identity(status: os.stat_result) -> tuple[tuple[int, int], int, int]:
    return (status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns


class SafetensorsFile(MappedFile):
    """Map a safetensors file, and know its tensors by name.

    Raises:
        ConfigurationError: If the file is not there, is cut off, or was not written for torch.
    """

    in_place = True
    """Whether an index may point at the tensors of this very file."""

    def __init__(self, path: FilePath) -> None:
        super().__init__(path)
        self._header = header = read_header(self.path)
        written = header.metadata.get("format", "pt")
        if written != "pt":
            raise ConfigurationError(
                f"{str(path)!r} was written for {written!r}, so its tensors may be laid out differently. "
                "Save it again from torch, which writes the metadata {'format': 'pt'}."
            )
        if header.file_size > self.size:
            raise ConfigurationError(
                f"The weights file {str(path)!r} is cut off: its header describes {header.file_size} bytes, and it has "
                f"{self.size}. Save or download it again."
            )

    def names(self) -> list[str]:
        """Return the names in the file."""
        return list(self._header.tensors)

    def find(self, name: str, dtype: torch.dtype | None = None) -> StoredTensor:
        """Return where a tensor lies.

        Args:
            dtype: What it is to be read as; as it is stored if not given.

        Raises:
            ConfigurationError: If the file has no such tensor.
        """
        entry = self._header.tensors.get(name)
        if entry is None:
            raise ConfigurationError(
                f"The weights file {str(self.path)!r} has no tensor {name!r}, which an index says is there. "
                "The file belongs to another checkpoint: load the checkpoint again."
            )
        start, end = entry["data_offsets"]
        offset, stored_dtype = self._header.data_start + start, torch_dtype(entry["dtype"])
        stored = StoredTensor(tuple(entry["shape"]), stored_dtype, end - start, self, offset, dtype)
        if stored_dtype is None:
            stored.tensor = self._read_by_package(name)
        return stored

    def _read_by_package(self, name: str) -> torch.Tensor:
        """Return a tensor of a dtype that only the package of the format knows."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt", device=HOST) as weights:
                found: torch.Tensor = weights.get_tensor(name)
                return found
        except (SafetensorError, AttributeError, RuntimeError) as error:  # it may be one that torch does not have
            raise ConfigurationError(
                f"The tensor {name!r} of {str(self.path)!r} cannot be read ({first_line(error)}). Save or download the file "
                "again, in a dtype that torch has."
            ) from error

    def like(self, name: str) -> torch.Tensor:
        """Return a tensor without data that is like one of the file."""
        stored = self.find(name)
        return torch.empty(stored.shape, dtype=stored.stored_dtype or stored.tensor.dtype, device=META)

    def read(self, name: str, device: torch.device | str = HOST) -> torch.Tensor:
        """Return one tensor on a device; on the CPU it is the pages of the file."""
        return self.like(name) if device == META else self.find(name).tensor.to(device)


class RawFile(MappedFile):
    """Map a file that holds the bytes of one tensor and nothing else.

    Raises:
        ConfigurationError: If the file is not there, or is shorter than the tensor.
    """

    def __init__(self, path: FilePath, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        super().__init__(path)

    def _map(self, descriptor: int) -> None:
        count = math.prod(self.shape)
        nbytes = count * self.dtype.itemsize
        if self.size < nbytes:
            raise ConfigurationError(
                f"The weights file {str(self.path)!r} is cut off: the index of its folder describes {nbytes} bytes, "
                f"and it has {self.size}. Write the folder again from the checkpoint."
            )
        with torch.inference_mode(False):
            if count == 0:  # an empty file cannot be mapped
                self._tensor = torch.empty(self.shape, dtype=self.dtype)
            else:
                # torch keeps no descriptor open, of which a folder with a file for each weight would need too many.
                mapped = torch.from_file(os.fspath(self.path), shared=False, size=count, dtype=self.dtype)
                self._tensor = mapped.reshape(self.shape)

    def find(self) -> StoredTensor:
        """Return its tensor."""
        return StoredTensor(self.shape, self.dtype, self._tensor.nbytes, self)

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """Return the mapped tensor."""
        return self._tensor


@dataclass(eq=False)
class StoredTensor:
    """Where the bytes of one tensor are.

    Args:
        stored_dtype: What it is stored as; None for a dtype of the format that torch does not have.
        file: The file that it lies in; None if it is in memory.
        offset: Where it begins in that file.
        read_dtype: What it is to be read as, if not as it is stored.
    """

    shape: tuple[int, ...]
    stored_dtype: torch.dtype | None
    nbytes: int
    file: MappedFile | None = None
    offset: int = 0
    read_dtype: torch.dtype | None = None

    @classmethod
    def in_memory(cls, tensor: torch.Tensor) -> StoredTensor:
        """Return a tensor that needs no file."""
        stored = cls(tuple(tensor.shape), tensor.dtype, tensor.nbytes)
        stored.tensor = tensor
        return stored

    @cached_property
    def tensor(self) -> torch.Tensor:
        """The tensor on the CPU: the pages of its file, unless it is small and not aligned there."""
        assert self.file is not None
        return self.file.tensor(self)

    @property
    def dtype(self) -> torch.dtype:
        """What it is to be read as."""
        return self.read_dtype or self.tensor.dtype

    @property
    def in_place(self) -> bool:
        """Whether the tensor is the pages of a file, not a copy of them."""
        if self.file is None or self.nbytes == 0 or self.stored_dtype is None:
            return False
        usable = self.offset % self.stored_dtype.itemsize == 0
        return usable and (self.offset % ALIGNMENT == 0 or self.nbytes > SMALL)

    def _pages(self) -> tuple[int, int]:
        """Return the addresses of all pages that the tensor touches."""
        start = self.tensor.data_ptr()
        return start - start % mmap.PAGESIZE, start + self.tensor.nbytes

    def prefetch(self) -> None:
        """Let the kernel start to read the pages, without waiting for them."""
        if hasattr(mmap, "MADV_WILLNEED"):
            pages.advise(*self._pages(), mmap.MADV_WILLNEED)

    def populate(self) -> None:
        """Read the pages into memory and put them into the page table; returns when they are there.

        To prefetch them before would cost half as much processor time again, which the module that runs needs. Only
        where the kernel cannot populate are they prefetched, and come when they are used.
        """
        start, end = self._pages()
        for chunk in range(start, end, _POPULATE_CHUNK):
            if not pages.populate(chunk, min(chunk + _POPULATE_CHUNK, end) - chunk):
                self.prefetch()
                return

    def drop_pages(self) -> None:
        """Give the pages back to the system, which reads them from the file if they are used again.

        What was written to them through a private mapping is lost, so this is for tensors that nobody wrote to.
        """
        address = self.tensor.data_ptr()
        end = address + self.tensor.nbytes
        # The pages that belong to this tensor alone.
        start, end = address + -address % mmap.PAGESIZE, end - end % mmap.PAGESIZE
        if end <= start or not hasattr(mmap, "MADV_DONTNEED") or not pages.advise(start, end, mmap.MADV_DONTNEED):
            return
        if self.file is not None and hasattr(os, "posix_fadvise"):
            # Pages that another process has mapped stay. A file that is gone has nothing to be dropped.
            with suppress(OSError):
                descriptor = os.open(self.file.path, os.O_RDONLY)
                try:
                    offset = self.offset + start - address
                    os.posix_fadvise(descriptor, offset, end - start, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


class LoadState(Enum):
    """How far a loaded tensor has come."""

    UNLOADED = auto()
    REQUESTED = auto()
    LOADING = auto()
    LOADED = auto()


@dataclass(eq=False)
class LoadedTensor:
    """A stored tensor as layers compute with it: loaded before a module runs, and maybe unloaded after.

    Times are counted in modules that have run.

    Args:
        device: Where it is used.
        dtype: What it is used as.
    """

    stored: StoredTensor
    device: torch.device
    dtype: torch.dtype
    state: LoadState = LoadState.UNLOADED
    users: int = 0
    pinned: bool = False
    used_at: int = -1
    interval: int | None = None
    expected_at: int = -1
    _content: torch.Tensor | Arrival | None = None
    _version: int = 0
    _lane: CopyLane | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        source = self.stored.tensor
        direct = self.device.type == HOST and source.dtype == self.dtype == self.stored.dtype
        self.is_held = direct and self.stored.file is None
        self.in_place = direct and self.stored.in_place
        self.nbytes = source.numel() * self.dtype.itemsize
        if self.is_held or self.in_place:
            self._content, self._version = source, source._version
        if self.is_held:
            self.state = LoadState.LOADED

    def use_lane(self, lanes: dict[torch.device, CopyLane | None]) -> None:
        """Use the lane to the tensor's device, made at the first call for each device."""
        if self.device.type != HOST and self.device not in lanes:
            lanes[self.device] = registry.get(self.device).copy_lane(self.device)
        self._lane = lanes.get(self.device)

    def use(self, clock: int) -> None:
        """Note that a module that needs it runs now."""
        if self.used_at >= 0 and clock > self.used_at:
            self.interval = clock - self.used_at
        self.used_at = clock
        self.users += 1

    def next_use(self, clock: int, slack: int) -> int:
        """Return when it is expected to be used next; of those that were used once, the last one is the furthest away.

        Args:
            slack: How long after the expected time it may still be used.
        """
        if self.expected_at >= clock:
            return self.expected_at
        if self.interval is None:
            return _NOT_KNOWN + self.used_at
        due = self.used_at + self.interval
        return due if due >= clock - slack else _NEVER

    def load(self) -> None:
        """Bring the tensor into memory, and return when it is there or, on an accelerator, on its way."""
        if self.stored.file is not None:
            self.stored.file.check()
        if self.in_place:
            self.stored.populate()
            return
        with torch.inference_mode(False), torch.no_grad():
            source = self.stored.tensor
            if self.stored.dtype not in (source.dtype, self.dtype):
                source = source.to(self.stored.dtype)
            if self._lane is not None:
                self._content = self._lane.send(source, self.dtype)
                self._version = self._content.tensor._version
                return
            if self.device.type == HOST:
                self._content = _host_memory(source.shape, self.dtype).copy_(source)
            else:
                self._content = source.to(self.device, self.dtype)
            self._version = self._content._version

    def value(self) -> torch.Tensor:
        """Return the tensor, which has been loaded or needs no loading."""
        if isinstance(self._content, Arrival):
            return self._content.take()
        assert self._content is not None
        return self._content

    def was_changed(self) -> bool:
        """Return whether somebody wrote to the tensor since it was loaded."""
        content = self._content.tensor if isinstance(self._content, Arrival) else self._content
        return content is not None and content._version != self._version

    def unload(self) -> None:
        """Let go of the memory; the next `load` brings the tensor again."""
        if self.in_place:
            self.stored.drop_pages()
        else:
            self._content = None
        self.state = LoadState.UNLOADED
        self.expected_at = -1


def _host_memory(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
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
