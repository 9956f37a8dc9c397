"""Look into what `torch.save` wrote before torch reads it.

`torch.load(weights_only=True)` runs no code of a file. Some bytes make it take all time or memory nevertheless, or write
beside an array: sizes that are not true, objects inside of each other, arguments that nobody saves. So what a file would
call is read as records first. This module is imported where torch is not.
"""

from __future__ import annotations

import io
import math
import mmap
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from accelerate._base.untrusted import check_regular, is_whole, shown
from accelerate.offload.pickle_records import Name, Record, RecordUnpickler, check_key, check_size, refuse

ARCHIVE_BEGINS = b"PK\x03\x04"
"""The first bytes of a file of torch 1.6 or later, by which torch itself knows it."""
_PICKLES_OF_OLD_FILES = 5
"""Mark, version, system, objects, and the order of their storages."""
_MOST_VALUES = 1_000_000


class _SavedUnpickler(RecordUnpickler):
    """Read what `torch.save` pickled; what it would call with arguments that nobody saves is refused.

    Names that are not known here are left to torch, which refuses them unless the program has allowed them.

    Args:
        size: Of the whole file, in bytes.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__(file, size)
        self.size = size

    def call(self, name: Name, args: Iterable[Any]) -> Any:
        """Return a record of a call."""
        made = Record(name, args)
        check = _CALLS.get(name)
        if check is not None:
            check(made)
        elif _NEVER_CALLED.fullmatch(name):
            refuse(f"it calls {name}")
        return made

    def build(self, record: Record, state: Any) -> None:
        """Give a record its state, once."""
        if record.state is not None:
            refuse(f"it gives a state to {record.name} twice")
        if record.name.startswith("torch._utils.") or record.name == _FROM_TYPE:
            refuse("it changes a tensor after it was made")
        super().build(record, state)
        check = _STATES.get(record.name)
        if check is not None:
            check(record)

    def persistent_load(self, pid: Any) -> Any:
        """Return a record of the memory of a tensor."""
        if not isinstance(pid, tuple) or len(pid) < 5 or not is_whole(pid[4], most=2 * self.size):
            refuse("the memory of a tensor in it is larger than the file")
        return Record("storage", pid)


_NEVER_CALLED = re.compile(r"torch\.(\w+\.)*(\w*Tensor|\w*Storage|Parameter)|numpy\.ndarray|numpy\.dtypes\.\w+")
"""What makes memory of any size, with whatever was in it; a file only names these."""
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"


def _check_dictionary(made: Record) -> None:
    for entry in made.args[0] if made.args else ():
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            refuse(f"it makes a {made.name} of what are no pairs")
        check_key(entry[0])


def _check_counter(made: Record) -> None:
    if made.args and not isinstance(made.args[0], dict):
        refuse("it counts what is no dictionary")


def _check_set(made: Record) -> None:
    if len(made.args) > 1 or (made.args and not isinstance(made.args[0], list | tuple)):
        refuse("it makes a set of what is no list")
    for entry in made.args[0] if made.args else ():
        check_key(entry)


def _check_encode(made: Record) -> None:
    if len(made.args) != 2 or not isinstance(made.args[0], str) or made.args[1] not in ("latin1", "latin-1"):
        refuse("it makes bytes of a text in another encoding than Latin-1")


def _check_bytearray(made: Record) -> None:
    is_text = len(made.args) == 2 and isinstance(made.args[0], str) and made.args[1] in ("latin1", "latin-1")
    if made.args and not is_text and (len(made.args) > 1 or _num_bytes(made.args[0]) is None):
        refuse("it makes bytes of what is no text")


def _num_bytes(value: object) -> int | None:
    """Return how many bytes a value of a pickle is, None if it is something else."""
    if isinstance(value, Record) and value.name == "_codecs.encode":
        value = value.args[0]
    return len(value) if isinstance(value, str | bytes) else None


def _check_from_type(made: Record) -> None:
    if len(made.args) != 4 or not isinstance(made.args[0], Name) or not isinstance(made.args[2], tuple):
        refuse(f"it calls {_FROM_TYPE} otherwise than torch does")
    inner = Record(made.args[0], made.args[2])
    check = _CALLS.get(inner.name)
    if check is not None:
        check(inner)
    elif _NEVER_CALLED.fullmatch(inner.name):
        refuse(f"it calls {inner.name}")


def _check_tensor(made: Record) -> None:
    """Refuse a tensor that is larger than the memory that it is said to be in, which torch would enlarge."""
    storage, offset, *layout = made.args[:4]
    size, stride = (_whole_numbers(entry) for entry in layout)
    if not isinstance(storage, Record) or storage.name != "storage" or not is_whole(offset) or len(size) != len(stride):
        refuse("a tensor in it has no memory, or no layout")
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    needed = last + 1 if all(size) else 0
    if made.name.endswith("_v3"):
        needed *= _element_size(made.args[6])
    if needed > storage.args[4]:
        refuse(f"a tensor in it has a size of {shown(list(size))} and less memory than that")


def _whole_numbers(value: object) -> tuple[int, ...]:
    entries = value.args[0] if isinstance(value, Record) and value.name == "torch.Size" and value.args else value
    if not isinstance(entries, list | tuple) or not all(map(is_whole, entries)):
        refuse("the layout of a tensor in it is not made of numbers")
    return tuple(entries)


def _element_size(name: object) -> int:
    import torch

    found = getattr(torch, str(name).removeprefix("torch."), None) if isinstance(name, Name) else None
    return found.itemsize if isinstance(found, torch.dtype) else refuse("a tensor in it has no number format")


def _check_size_of_tensor(made: Record) -> None:
    if made.args:
        _whole_numbers(made.args[0])


def _check_nested(made: Record) -> None:
    refuse("it holds a nested tensor, whose layout torch does not check")


# --- arrays of numpy ---


def _numpy_dtype(record: object) -> Any:
    """Return the number format that a record stands for; only formats whose values are plain bytes."""
    import numpy

    if not isinstance(record, Record) or record.name != "numpy.dtype" or not 1 <= len(record.args) <= 3:
        refuse("an array in it has no number format")
    code = record.args[0]
    code = code.decode("latin1") if isinstance(code, bytes) else code
    if not isinstance(code, str) or not re.fullmatch(
        r"[<>|=]?([?bBhHiIlLqQefdgFDG]|[biufcmM]\d{1,2}|[SU]\d{1,5})", code
    ):
        refuse(f"an array in it has the number format {shown(code)}")
    if any(type(flag) is not bool and flag not in (0, 1) for flag in record.args[1:]):
        refuse("the number format of an array in it is made otherwise than numpy does")
    try:
        return numpy.dtype(code)
    except TypeError:
        refuse(f"an array in it has the number format {shown(code)}")


def _check_dtype_state(record: Record) -> None:
    dtype, state = _numpy_dtype(record), record.state
    version, order, *structure = state[:5] if isinstance(state, tuple) and len(state) in (8, 9) else (0, 0)
    is_plain = (
        version in (3, 4)
        and order in ("<", ">", "|", "=", b"<", b">", b"|", b"=")
        and structure == [None, None, None]
        and state[5] in (-1, dtype.itemsize)
        and state[6] in (-1, dtype.alignment)
        and state[7] == dtype.flags
    )
    if not is_plain or (len(state) == 9 and not (dtype.kind in "mM" and _is_unit_of_time(state[8]))):
        refuse("the number format of an array in it has another state than numpy gives it")


def _is_unit_of_time(value: object) -> bool:
    labels, unit = value if isinstance(value, tuple) and len(value) == 2 else (0, ())
    if labels not in (None, {}) or not isinstance(unit, tuple) or len(unit) != 4:
        return False
    return (_num_bytes(unit[0]) or 99) < 10 and all(is_whole(number, 1, 10**6) for number in unit[1:])


def _check_array(made: Record) -> None:
    kind, shape, code = made.args if len(made.args) == 3 else (None, None, None)
    if kind != "numpy.ndarray" or not isinstance(kind, Name) or shape != (0,) or _num_bytes(code) != 1:
        refuse("it makes an array otherwise than numpy does")


def _check_array_state(record: Record) -> None:
    state = record.state
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[1], tuple):
        refuse("an array in it has another state than numpy gives it")
    shape, size = state[1], _num_bytes(state[4])
    if not all(map(is_whole, shape)) or size != math.prod(shape) * _numpy_dtype(state[2]).itemsize:
        refuse("an array in it has another size than its bytes")


def _check_scalar(made: Record) -> None:
    if len(made.args) != 2 or _num_bytes(made.args[1]) != _numpy_dtype(made.args[0]).itemsize:
        refuse("a number of numpy in it has another size than its bytes")


_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
_CALLS: dict[str, Callable[[Record], object]] = {
    "collections.OrderedDict": _check_dictionary,
    "collections.Counter": _check_counter,
    "builtins.set": _check_set,
    "builtins.frozenset": _check_set,
    "builtins.bytearray": _check_bytearray,
    "_codecs.encode": _check_encode,
    "torch.Size": _check_size_of_tensor,
    "torch._utils._rebuild_nested_tensor": _check_nested,
    _FROM_TYPE: _check_from_type,
    **{f"torch._utils._rebuild_{kind}": _check_tensor for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor")},
    "numpy.dtype": _numpy_dtype,
    **{f"{core}._reconstruct": _check_array for core in _CORES},
    **{f"{core}.scalar": _check_scalar for core in _CORES},
}
"""What is asked of a call before torch may make it."""
_STATES: dict[str, Callable[[Record], None]] = {
    "numpy.dtype": _check_dtype_state,
    **{f"{core}._reconstruct": _check_array_state for core in _CORES},
}


# --- files ------------------------------------------------------------------------------------------------------------------


def check_torch_file(file: Path | IO[bytes]) -> bool:
    """Refuse a file that `torch.load` would wait for, or take all time or memory for; return whether it is an archive.

    Args:
        file: A path, or an open file at the place where it begins.

    Raises:
        ConfigurationError: If it is no file.
        pickle.UnpicklingError: If it is refused.
        Exception: Whatever broken bytes make the readers of archives and pickles raise.
    """
    if not isinstance(file, Path):
        place = file.tell()
        content = file.read()
        file.seek(place)
        return check_saved(memoryview(content))
    size = check_regular(file).st_size
    with file.open("rb") as opened:
        if opened.read(len(ARCHIVE_BEGINS)) != ARCHIVE_BEGINS:
            opened.seek(0)
            _check_old_file(opened, size)
            return False
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            return check_saved(view)


@contextmanager
def sparse_checked(map_location: object = None) -> Iterator[None]:
    """Make torch validate the indices of sparse tensors that it loads.

    torch 2.15 does so for every `weights_only=True`, and warns that it takes time.

    Args:
        map_location: Device to load to; on "meta" there are no indices.
    """
    import torch

    checked = nullcontext() if str(map_location) == "meta" else torch.sparse.check_sparse_tensor_invariants()
    with checked, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Validating sparse tensor invariants")
        yield


def check_saved(content: memoryview) -> bool:
    """Refuse bytes for which `torch.load` would take all time or memory; return whether they are an archive.

    Raises:
        pickle.UnpicklingError: If they are refused.
        Exception: Whatever broken bytes make the readers of archives and pickles raise.
    """
    is_archive = content[: len(ARCHIVE_BEGINS)] == ARCHIVE_BEGINS
    if is_archive:
        _check_pickle(io.BytesIO(archived_pickle(content)), len(content))
    else:
        _check_old_file(io.BytesIO(content), len(content))
    return is_archive


def _check_old_file(file: IO[bytes], size: int) -> None:
    """Look at the pickles with which a file of torch before 1.6 begins."""
    for _ in range(_PICKLES_OF_OLD_FILES):
        _check_pickle(file, size)


def _check_pickle(file: IO[bytes], size: int) -> None:
    begin = file.tell()
    try:
        found = _SavedUnpickler(file, size).load()
    except KeyError:
        return  # an instruction at which torch itself stops
    check_size(found, max(_MOST_VALUES, 10 * (file.tell() - begin)))


# --- archives -----------------------------------------------------------------------------------------------------------------

_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_PLACE_OF_END_64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_FILE = struct.Struct("<4s5H3I2H")


def archived_pickle(content: memoryview) -> bytes:
    """Return the pickle in an archive that torch wrote.

    Readers of archives differ in where they look for the list of files, and in which of two files of one name they take.
    So there is one place for each here, and everything else is refused.

    Raises:
        pickle.UnpicklingError: If it is no such archive, or packed, which may be many times as large in memory.
        struct.error: If it is cut off.
    """
    found: list[bytes] = []
    names: set[bytes] = set()
    for name, method, flags, packed, size, place in _entries(content):
        if method or flags & 1 or packed != size:
            refuse(
                f"it is a packed archive ({shown(name.decode(errors='replace'))}), and torch saves weights as they are"
            )
        if name.lower() in names:
            refuse(f"two files in it have the name {shown(name.decode(errors='replace'))}")
        names.add(name.lower())
        if name.lower().rpartition(b"/")[2] == b"data.pkl":
            begin, _, _, _, _, _, _, _, _, *lengths = _FILE.unpack_from(content, place)
            begins = place + _FILE.size + sum(lengths)
            if begin != ARCHIVE_BEGINS or begins + size > len(content):
                refuse("its archive is broken")
            found.append(bytes(content[begins : begins + size]))
    if len(found) != 1:
        refuse("it is an archive without a pickle, or with several")
    return found[0]


def _entries(content: memoryview) -> Iterator[tuple[bytes, int, int, int, int, int]]:
    """Yield the list of files in an archive, which must be at its end: names, how packed, flags, both sizes, places."""
    last = len(content) - _END.size
    mark, *_, size, place, comment = _END.unpack_from(content, last)
    at_64 = last - _PLACE_OF_END_64.size
    if at_64 >= 0 and bytes(content[at_64 : at_64 + 4]) == b"PK\x06\x07":
        *_, stated, _ = _PLACE_OF_END_64.unpack_from(content, at_64)
        last = at_64 - _END_64.size
        mark_64, *_, size, place = _END_64.unpack_from(content, last)
        mark = mark if mark_64 == b"PK\x06\x06" and stated == last else b""
    if mark != b"PK\x05\x06" or comment or place + size != last:
        refuse("the list of files in its archive is not where torch writes it")
    while place < last:
        mark, _, _, flags, method, _, _, _, packed, size, *lengths, _, _, _, begin = _ENTRY.unpack_from(content, place)
        if mark != b"PK\x01\x02":
            refuse("the list of files in its archive is broken")
        name = bytes(content[place + _ENTRY.size : place + _ENTRY.size + lengths[0]])
        yield name, method, flags, packed, size, begin
        place += _ENTRY.size + sum(lengths)
    if place != last:
        refuse("the list of files in its archive is broken")
