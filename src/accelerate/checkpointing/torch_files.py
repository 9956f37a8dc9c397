"""Write an object to a torch file once per run, read one without running code from it, and say what would be run."""

from __future__ import annotations

import codecs
import copy
import errno
import logging
import os
import pickle
import threading
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from typing import IO, Any

import numpy
import torch
from safetensors.torch import save_file
from torch import serialization

from accelerate._base import pages
from accelerate._base.errors import WrongTypeError, printable
from accelerate._base.helpers import log_once
from accelerate._base.untrusted import UNPICKLER_MARK, escaping_errors, first_line
from accelerate.config import env
from accelerate.offload.safetensors_format import clean_state_dict_for_safetensors, identity_in_memory
from accelerate.offload.torch_format import check_torch_file, sparse_checked
from accelerate.runtime import current

_LOG = logging.getLogger(__name__)
ALLOW_PICKLE = "ACCELERATE_ALLOW_PICKLE"
"""The variable that lets checkpoints be read that hold more than plain data, by a program that cannot be changed."""
_ARRAY: Any = numpy.zeros(0).__reduce__()[0]
_SCALAR: Any = numpy.float64(0).__reduce__()[0]
TORCH_SAFE_GLOBALS: list[Any] = [
    # What pickled arrays and numbers of numpy are made of, a random state among them.
    _ARRAY,
    _SCALAR,
    numpy.ndarray,
    codecs.encode,
    frozenset,
    numpy.dtype,
    *(type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUMm"),
    # Before and after numpy 2, which renamed a package.
    *(
        (function, f"numpy.{core}.multiarray.{function.__name__}")
        for function in (_ARRAY, _SCALAR)
        for core in ("core", "_core")
    ),
]
"""The types beyond tensors that `load` accepts in a file."""
_PLAIN_VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device}
)
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_PLAIN_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
_trusting = threading.RLock()
"""What is trusted is a setting of the whole process in torch: one thread at a time changes it."""
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

    Raises:
        pickle.UnpicklingError: If it holds what only code could read, or what would take all time or memory to read.
    """
    kwargs.setdefault("weights_only", True)
    if kwargs["weights_only"]:
        check_torch_file(Path(f) if isinstance(f, str | PathLike) else f)
    with trust(TORCH_SAFE_GLOBALS), sparse_checked(map_location), escaping_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected pickle protocol")  # what it cannot read is an error anyway
        return torch.load(f, map_location=map_location, **kwargs)


@contextmanager
def trust(classes: list[Any]) -> Iterator[None]:
    """Let `torch.load(weights_only=True)` build objects of further classes inside of a block, and those it built before."""
    with _trusting:
        # torch's own manager takes away at its end what the program itself had allowed before.
        known = serialization.get_safe_globals()
        with serialization.safe_globals([entry for entry in classes if entry not in known]):
            yield


# --- files that hold more than data -----------------------------------------------------------------------------------


def allows_pickle(load_kwargs: Mapping[str, Any]) -> bool:
    """Return whether files of a checkpoint may run code while they are read: only if somebody asked for it by name.

    Args:
        load_kwargs: What the program said; `"weights_only"` in it comes before the variable.
    """
    return not load_kwargs.get("weights_only", not env.flag(ALLOW_PICKLE))


def refusal(f: str | Path, error: pickle.UnpicklingError, source: IO[bytes] | None = None) -> str:
    """Return why a file of a checkpoint is not read, what it would run, and how to allow it.

    Args:
        error: What torch said of it.
        source: Its bytes, where it is only a part of the file.
    """
    names = _called_names(source or f)
    what = (
        f"because that would run code which it names: {names}"
        if names
        else f"because it is broken, or because only code that it runs could read it ({_reason(error)})"
    )
    return (
        f"{str(f)!r} is not read, {what}. A checkpoint from elsewhere could do harm this way. If you trust whoever wrote "
        f"it, write load_state(..., load_kwargs={{'weights_only': False}}), or set {ALLOW_PICKLE}=1 for a program that "
        "cannot be changed."
    )


def broken(f: Path, error: Exception) -> str:
    """Return that a file of a checkpoint cannot be read, and what its reader said of it."""
    return (
        f"{str(f)!r} cannot be read ({type(error).__name__}: {first_line(error)}), so it is probably broken. Use another "
        "checkpoint."
    )


def _reason(error: pickle.UnpicklingError) -> str:
    """Return what torch says of a pickle, without the advice after it."""
    return str(error).rpartition(UNPICKLER_MARK)[2].partition("\\n")[0]


def _called_names(f: str | Path | IO[bytes]) -> str:
    """Return the functions and classes that reading a torch file would call and nobody has allowed; none if unknown."""
    if not isinstance(f, str | Path):
        f.seek(0)
    with trust(TORCH_SAFE_GLOBALS), suppress(Exception):  # whatever broken bytes make torch's readers raise
        return ", ".join(map(printable, sorted(serialization.get_unsafe_globals_in_checkpoint(f))))
    return ""  # an old format, or an instruction that torch does not look behind


def warn_if_refused(f: Path | IO[bytes], owner: str) -> None:
    """Say once, for each owner, that what was just saved will be refused when it is loaded, and what to do.

    Args:
        f: The torch file that was written.
        owner: Whose state it is.
    """
    if not isinstance(f, Path):
        f.seek(0)
    try:
        load(f, map_location="meta")
    except pickle.UnpicklingError as error:
        names = _called_names(f) or _reason(error)
        log_once(
            __name__,
            f"The state of {owner} holds more than data: {names}. To read that again means to run code which a file "
            "names, so load_state() will refuse it. Return tensors, numbers, text, lists and dictionaries from "
            "state_dict(); or allow it where it is loaded, with load_state(..., load_kwargs={'weights_only': False}) or, "
            f"for a program that cannot be changed, with {ALLOW_PICKLE}=1.",
        )
    except Exception:  # noqa: BLE001 - what cannot be looked at this way is no reason to lose a checkpoint
        _LOG.debug("The state of %s could not be looked at.", owner, exc_info=True)


def warn_of_code(value: Any, owner: str) -> None:
    """Say once that a value which is about to be saved will be refused when it is loaded, if it holds more than data."""
    if not is_plain(value):
        with BytesIO() as buffer:
            torch.save(value, buffer)
            warn_if_refused(buffer, owner)


def is_plain(value: Any) -> bool:
    """Return whether a value is made of what every torch file may hold; False where only a look at the file would tell."""
    pending, seen = [value], set[int]()
    while pending:
        entry = pending.pop()
        kind = type(entry)
        if kind in _PLAIN_VALUES or (kind in _PLAIN_TENSORS and not entry.__dict__):
            continue
        if kind not in _PLAIN_CONTAINERS:
            return False
        if id(entry) not in seen:
            seen.add(id(entry))
            pending += entry
            pending += entry.values() if isinstance(entry, dict) else ()
    return True


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


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in dictionaries, lists, tuples and sets, each once."""
    found: dict[int, torch.Tensor] = {}
    pending, seen = [value], set[int]()
    while pending:
        entry = pending.pop()
        if isinstance(entry, torch.Tensor):
            found[id(entry)] = entry
        elif isinstance(entry, dict | list | tuple | set) and id(entry) not in seen:
            seen.add(id(entry))
            pending += entry.values() if isinstance(entry, dict) else entry
    return list(found.values())
