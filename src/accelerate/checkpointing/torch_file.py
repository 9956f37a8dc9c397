"""Read the tensors of a torch file in several threads.

`torch.load` reads one tensor after the other, and most of its time goes into memory that the system hands out page by
page. Here the file is mapped first, and several threads then copy what was mapped.
"""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from accelerate._base import pages
from accelerate.checkpointing.files import load

_WORTH_IT = 32 * 2**20
"""The size of a file in bytes from which on threads are started for it."""
_NUM_THREADS = 4


def read(path: Path, **keywords: Any) -> Any:
    """Return what `torch.load` returns, in memory of its own, with the keywords of `files.load`.

    Raises:
        OSError: If the file cannot be read.
        RuntimeError: If it is no torch file.
    """
    if "mmap" in keywords or str(keywords.get("map_location")) != "cpu" or not keywords.get("weights_only", True):
        return load(path, **keywords)
    if path.stat().st_size < _WORTH_IT or not pages.can_populate() or not zipfile.is_zipfile(path):
        return load(path, **keywords)
    state = load(path, mmap=True, **keywords)
    tensors = [tensor for tensor in _tensors(state) if tensor.layout is torch.strided]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    if len(storages) != _count(path):
        # One is inside of an object that is not looked into, or of a sparse tensor.
        return load(path, **keywords)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        copies = dict(zip(storages, pool.map(_copy, storages.values()), strict=True))
    for tensor in tensors:
        copied = copies[tensor.untyped_storage()._cdata]
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            copied, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return state


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    # Asked for before it is touched: a disk that fails is then an error, and not the end of the process.
    if storage.nbytes() and not pages.populate(storage.data_ptr(), storage.nbytes()):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return torch.empty(0, dtype=torch.uint8).set_(storage).clone().untyped_storage()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple | set):
        for entry in value:
            yield from _tensors(entry)


def _count(path: Path) -> int:
    """Return how many storages a file has."""
    with zipfile.ZipFile(path) as archive:
        return sum("/data/" in name for name in archive.namelist())
