"""Write an object to a torch file once per run, and read one without running code from it."""

from __future__ import annotations

import codecs
import copy
import errno
import os
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from safetensors.torch import save_file
from torch.serialization import safe_globals

from accelerate._base import pages
from accelerate._base.errors import WrongTypeError
from accelerate.offload.safetensors_format import clean_state_dict_for_safetensors, identity_in_memory
from accelerate.runtime import current

TORCH_SAFE_GLOBALS: list[Any] = [
    # What a pickled numpy random state is made of.
    numpy.zeros(0).__reduce__()[0],
    numpy.ndarray,
    codecs.encode,
    numpy.dtype,
    type(numpy.dtype(numpy.uint32)),
]
"""The types beyond tensors that `load` accepts in a file."""
_THREADS_FROM = 32 * 2**20
"""The size of a file in bytes from which on threads are started for it."""
_NUM_THREADS = 4


def save(
    obj: Any, f: str | PathLike[str] | IO[bytes], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object to a file, on the main process only.

    Args:
        obj: What to save; a flat mapping of names to tensors with `safe_serialization`.
        f: Path or open file.
        save_on_each_node: Write on the first process of every machine.
        safe_serialization: Write safetensors instead of a torch file.

    Raises:
        WrongTypeError: If `safe_serialization` is asked for something that is not a mapping of tensors.
    """
    runtime = current.runtime()
    runtime.backend.end_step()  # on all ranks: what is recorded may hold an exchange between them
    if runtime.local_rank != 0 if save_on_each_node else runtime.rank != current.main_rank():
        return
    if runtime.backend.records_operations:
        obj = on_host(obj)
    if not safe_serialization:
        torch.save(obj, f)
        return
    if not isinstance(obj, Mapping) or not all(isinstance(value, torch.Tensor) for value in obj.values()):
        raise WrongTypeError(
            f"save(safe_serialization=True) was given a {type(obj).__name__}, but safetensors holds only a flat mapping "
            "of names to tensors. Pass a state dict, or write safe_serialization=False."
        )
    if not isinstance(f, str | PathLike):
        raise WrongTypeError(
            f"save(safe_serialization=True) was given {f!r}, but safetensors are written to a path. Pass a path."
        )
    save_file(clean_state_dict_for_safetensors(dict(obj)), fspath(f), metadata={"format": "pt"})


def on_host(value: Any) -> Any:
    """Return `value` with the tensors in its dictionaries, lists and tuples in host memory; shared ones stay shared."""
    copies: dict[Any, torch.Tensor] = {}

    def moved(entry: Any) -> Any:
        if isinstance(entry, torch.Tensor):
            if entry.device.type == "cpu":
                return entry
            identity = identity_in_memory(entry)
            key = id(entry) if identity is None else identity
            if key not in copies:
                copies[key] = entry.detach().cpu()
            return copies[key]
        if isinstance(entry, dict):
            same_kind = copy.copy(entry)
            same_kind.update({key: moved(item) for key, item in entry.items()})
            return same_kind
        return type(entry)(map(moved, entry)) if type(entry) in (list, tuple) else entry

    return moved(value)


def load(f: str | PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Read a torch file without running code from it.

    `weights_only` is True unless the caller says otherwise; numpy arrays, as in a saved random state, are accepted.
    """
    kwargs.setdefault("weights_only", True)
    with safe_globals(TORCH_SAFE_GLOBALS):
        return torch.load(f, map_location=map_location, **kwargs)


def load_in_threads(path: Path, **keywords: Any) -> Any:
    """Return what `load` returns, read by several threads where that is faster.

    `torch.load` reads one tensor after the other, and most of its time goes into memory that the system hands out page
    by page. Here the file is mapped first, and several threads then copy what was mapped.

    Raises:
        OSError: If the file cannot be read.
        RuntimeError: If it is no torch file.
    """
    if "mmap" in keywords or str(keywords.get("map_location")) != "cpu" or not keywords.get("weights_only", True):
        return load(path, **keywords)
    if path.stat().st_size < _THREADS_FROM or not pages.can_populate() or not zipfile.is_zipfile(path):
        return load(path, **keywords)
    state = load(path, mmap=True, **keywords)
    tensors = [tensor for tensor in _tensors(state) if tensor.layout is torch.strided]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    with zipfile.ZipFile(path) as archive:
        num_storages = sum("/data/" in name for name in archive.namelist())
    if len(storages) != num_storages:
        # One is inside of an object that is not looked into, or of a sparse tensor.
        return load(path, **keywords)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        copies = dict(zip(storages, pool.map(_copy_mapped, storages.values()), strict=True))
    for tensor in tensors:
        copied = copies[tensor.untyped_storage()._cdata]
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
            copied, tensor.storage_offset(), tensor.size(), tensor.stride()
        )
    return state


def _copy_mapped(storage: torch.UntypedStorage) -> torch.UntypedStorage:
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
