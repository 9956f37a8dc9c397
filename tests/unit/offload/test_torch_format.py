"""Files from `torch.save` load. Files that would exhaust time or memory, or write out of bounds, are rejected first."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from accelerate.checkpointing.torch_files import load
from accelerate.offload.torch_format import check_torch_file
from accelerate.offload.weight_files import load_torch


def archive(pickled: bytes, stored: bytes = bytes(24), compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive with the layout of `torch.save` and the given pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as file:
        entries = {"data.pkl": pickled, "byteorder": b"little", "data/0": stored, "version": b"3\n"}
        for name, data in entries.items():
            file.writestr(f"archive/{name}", data)
    return content.getvalue()


# --- hand-written pickles -------------------------------------------------------------------------------------------------


def string(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    encoded = pickle.encode_long(value)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def group(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def call(name: str, *parts: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + group(*parts) + b"R"


def in_bytes(data: bytes) -> bytes:
    return call("_codecs.encode", string(data.decode("latin1")), string("latin1"))


def named(name: str) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode()


def storage(count: int, kind: str = "torch.FloatStorage") -> bytes:
    return group(string("storage"), named(kind), string("0"), string("cpu"), number(count)) + b"Q"


def tensor(count: int, size: bytes, stride: bytes, offset: int = 0) -> bytes:
    return call("torch._utils._rebuild_tensor_v2", storage(count), number(offset), size, stride, b"\x89", b"}")


def dtype(code: str, state: bytes = b"") -> bytes:
    return call("numpy.dtype", string(code), b"\x89", b"\x88") + (state and state + b"b")


def dtype_state(
    size: int = -1, alignment: int = -1, flags: int = 0, fields: bytes = b"NNN", more: bytes = b"", version: int = 3
) -> bytes:
    return group(number(version), string("<"), fields, number(size), number(alignment), number(flags), more)


def array(kind: bytes, shape: bytes, data: bytes) -> bytes:
    empty = call("numpy._core.multiarray._reconstruct", named("numpy.ndarray"), group(number(0)), in_bytes(b"b"))
    return empty + group(number(1), shape, kind, b"\x89", data) + b"b"


def doubling_tuples(levels: int) -> bytes:
    """Return a pickle of nested pairs; both items of a pair are the same object, so hashing takes exponential time."""
    return group(number(1)) + b"".join(b"q%ch%c\x86" % (level, level) for level in range(levels))


def doubling_lists(levels: int) -> bytes:
    return b"]" + b"".join(b"q%c](h%ch%ce" % (level, level, level) for level in range(levels))


HARMFUL = {
    "a dict key of exponential size": b"}" + doubling_tuples(60) + b"Ns",
    "a set item of exponential size": call("builtins.set", b"]" + doubling_tuples(60) + b"a"),
    "an OrderedDict key of that size": call("collections.OrderedDict", b"](" + doubling_tuples(60) + b"N\x86e"),
    "a large key": b"}" + group(*[number(1)] * 200) + b"Ns",
    "a key with many digits": b"}" + number(1 << 500) + b"Ns",
    "a key that is a list": b"}]Ns",
    "lists that double at every level": doubling_lists(60),
    "deeply nested lists": b"]" * 200 + b"a" * 199,
    "tuples that double at every level": doubling_tuples(60),
    "a huge bytearray": call("builtins.bytearray", number(10**12)),
    "a slow encoding": call("_codecs.encode", string("aé" * 10), string("punycode")),
    "a Counter of a string": call("collections.Counter", string("abc")),
    "a huge UntypedStorage": call("torch.storage.UntypedStorage", number(10**12)),
    "a huge tensor": call("torch.Tensor", number(10**9)),
    "a huge FloatTensor": call("torch.FloatTensor", number(10**9)),
    "a parameter made from a size": named("torch.nn.parameter.Parameter") + group(number(3)) + b"\x81",
    "a tensor made from a size by _rebuild_from_type_v2": call(
        "torch._tensor._rebuild_from_type_v2", named("torch.Tensor"), named("torch.Tensor"), group(number(9)), b"}"
    ),
    "a storage larger than the file": tensor(10**9, group(number(10**9)), group(number(1))),
    "a tensor larger than its storage": tensor(6, group(number(10**9)), group(number(1))),
    "a tensor that starts after the end of its storage": tensor(6, group(number(1)), group(number(1)), offset=6),
    "a tensor whose strides leave its storage": tensor(6, group(number(2)), group(number(6))),
    "a tensor with a negative stride": tensor(6, group(number(2)), group(number(-3))),
    "a tensor with too few strides": tensor(6, group(number(2)), group()),
    "a tensor with a state": tensor(6, group(number(6)), group(number(1))) + group(storage(6)) + b"b",
    "a tensor larger than its untyped storage": call(
        "torch._utils._rebuild_tensor_v3",
        *(storage(6, "torch.storage.UntypedStorage"), number(0), group(number(3)), group(number(1))),
        *(b"\x89", b"}", named("torch.float32")),
    ),
    "a nested tensor": call("torch._utils._rebuild_nested_tensor", b"NNNN"),
    "a huge array": named("numpy.ndarray") + group(group(number(10**9))) + b"\x81",
    "an array larger than its data": array(dtype("f8"), group(number(100)), in_bytes(b"12345678")),
    "an array of objects": array(dtype("O"), group(number(1)), in_bytes(b"12345678")),
    "an array whose dtype has another item size": array(
        dtype("S1", dtype_state(4096, 1)), group(number(4)), in_bytes(b"abcd")
    ),
    "a dtype whose item size grows after an array uses it": b"]("
    + dtype("S1")
    + b"q\x01"
    + array(b"h\x01", group(number(4)), in_bytes(b"abcd"))
    + b"h\x01"
    + dtype_state(4096, 1)
    + b"be",
    "a dtype with flags": dtype("f8", dtype_state(flags=63)),
    "a dtype with fields": dtype("S8", dtype_state(8, 1, fields=b"N" + group(string("a")) + b"}")),
    "a dtype with an invalid time unit": dtype("M8", dtype_state(more=group(b"N", group(number(1))), version=4)),
    "a dtype whose state is set twice": dtype("f8", dtype_state()) + dtype_state() + b"b",
    "a scalar smaller than its dtype": call("numpy._core.multiarray.scalar", dtype("S5"), in_bytes(b"1")),
    "a scalar of negative size": call(
        "numpy._core.multiarray.scalar", dtype("S1", dtype_state(-(2**31), 1)), in_bytes(b"1")
    ),
    "item assignment in an array": array(dtype("f8"), group(number(1)), in_bytes(b"12345678"))
    + number(0)
    + number(7)
    + b"s",
    "an item appended to a string": string("a") + number(1) + b"a",
    "a very long name": named(f"a.{'b' * 2000}"),
    "an OrderedDict of a string": call("collections.OrderedDict", b"](" + string("abc") + b"e"),
    "an OrderedDict with a list as a key": call("collections.OrderedDict", b"](]N\x86e"),
    "a set of a string": call("builtins.set", string("abc")),
    "a set that contains a list": call("builtins.set", b"](]e"),
    "a call of a dict": b"})R",
    "a call with too few arguments": call("torch._tensor._rebuild_from_type_v2", named("torch.Tensor")),
    "an array without a dtype": array(number(1), group(number(1)), in_bytes(b"1")),
    "a dtype with an unexpected argument": call("numpy.dtype", string("f4"), number(7), b"\x88"),
    "a dtype unknown to NumPy": dtype("f3"),
    "a huge array from _reconstruct": call(
        "numpy._core.multiarray._reconstruct", named("numpy.ndarray"), group(number(10**9)), in_bytes(b"b")
    ),
    "an array with an integer as its state": call(
        "numpy._core.multiarray._reconstruct", named("numpy.ndarray"), group(number(0)), in_bytes(b"b")
    )
    + number(1)
    + b"b",
}


@pytest.mark.parametrize("pickled", HARMFUL.values(), ids=HARMFUL)
def test_a_harmful_pickle_is_rejected(pickled: bytes, tmp_path: Path) -> None:
    content = archive(b"\x80\x02" + pickled + b".")
    (tmp_path / "weights.bin").write_bytes(content)
    for file in (tmp_path / "weights.bin", io.BytesIO(content)):
        with pytest.raises(pickle.UnpicklingError):
            load(file)
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_torch(tmp_path / "weights.bin", "cpu")


@pytest.mark.parametrize("pickled", HARMFUL.values(), ids=HARMFUL)
def test_a_harmful_pickle_is_rejected_in_the_legacy_format(pickled: bytes, tmp_path: Path) -> None:
    old = io.BytesIO()
    torch.save({}, old, _use_new_zipfile_serialization=False)
    content = old.getvalue()
    begin = content.index(pickle.dumps({}, 2), 100)  # after the header, which describes the system
    (tmp_path / "weights.bin").write_bytes(content[:begin] + b"\x80\x02" + pickled + b".")
    with pytest.raises(pickle.UnpicklingError):
        check_torch_file(tmp_path / "weights.bin")


# --- files from torch.save ------------------------------------------------------------------------------------------------


class Marked(torch.Tensor):
    """A tensor subclass that torch does not trust by default."""


def with_metadata() -> OrderedDict[str, Any]:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert hasattr(state, "_metadata")
    return state


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8]
NUMPY_CODES = ["f8", "i4", "?", "S5", "U7", "M8[ns]", "m8", "c16", "u2", "g"]
PLAIN: dict[str, Callable[[], Any]] = {
    "values": lambda: {"a": [1, 2.5, None, True, -(2**70), "x" * 500, b"\xff\0", (), (1, (2, 3))], 3: {"b": {}}},
    "keys": lambda: {(1, "a"): 1, None: 2, 2.5: 3, b"x": 4, (torch.float32, 3): 5},
    # The frozenset has one item: the printed order of several strings would depend on the hash seed.
    "containers": lambda: [{1, 2}, frozenset({(1, 2)}), bytearray(b"abc"), Counter("aab"), 1j, torch.Size([2, 3])],
    "an OrderedDict": lambda: OrderedDict(b=1, a=OrderedDict(c=2)),
    "a state dict": with_metadata,
    "an optimizer": lambda: torch.optim.AdamW(torch.nn.Linear(2, 2).parameters()).state_dict(),
    "tensors of several dtypes": lambda: {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES},
    "views": lambda: [(base := torch.arange(24.0).view(4, 6))[1:, ::2], base.t(), base[2, 3], base, base[:0]],
    "expanded": lambda: torch.arange(3.0).expand(1000, 3),
    "empty": lambda: [torch.empty(0), torch.empty(3, 0, 2), torch.tensor(1.0)],
    "parameters": lambda: torch.nn.Parameter(torch.ones(2)),
    "meta": lambda: torch.empty(10**9, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "arrays": lambda: [numpy.zeros((2, 3), code) for code in NUMPY_CODES],
    "a column-major array": lambda: numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "NumPy scalars": lambda: [numpy.float64(3), numpy.str_("abc"), numpy.int8(-1), numpy.datetime64("2026-01-01")],
    "an RNG state": lambda: numpy.random.RandomState(0).get_state(),
    "a shared list": lambda: [[1, 2]] * 1000,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_saved_values_load_unchanged(make: Callable[[], Any], is_new: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved.bin"
    torch.save(make(), path, _use_new_zipfile_serialization=is_new)
    assert check_torch_file(path) is is_new
    with path.open("rb") as file:
        assert str(load(file)) == str(load(path)) == str(make())


def test_rare_dtypes_and_byte_orders_load(tmp_path: Path) -> None:
    saved = {"float8": torch.ones(3).to(torch.float8_e4m3fn), "uint32": torch.arange(3).to(torch.uint32)[1:]}
    torch.save({**saved, "array": numpy.array([1, 2, 3], ">i4")}, tmp_path / "saved.bin")
    found = load(tmp_path / "saved.bin")
    assert found.pop("array").tolist() == [1, 2, 3]
    assert str(found) == str(saved)


def test_a_list_that_contains_itself_loads(tmp_path: Path) -> None:
    value: list[Any] = [1]
    value.append(value)
    torch.save(value, tmp_path / "saved.bin")
    found = load(tmp_path / "saved.bin")
    assert found[1] is found


def test_a_class_loads_once_it_is_a_safe_global(tmp_path: Path) -> None:
    torch.save(torch.ones(2).as_subclass(Marked), tmp_path / "saved.bin")
    with pytest.raises(pickle.UnpicklingError, match="Marked"):
        load(tmp_path / "saved.bin")
    with torch.serialization.safe_globals([Marked]):
        assert type(load(tmp_path / "saved.bin")) is Marked


def test_invalid_sparse_indices_are_rejected(tmp_path: Path) -> None:
    torch.save(torch.sparse_coo_tensor([[9]], [1.0], (3,), check_invariants=False), tmp_path / "saved.bin")
    with pytest.raises(RuntimeError, match="index"):
        load(tmp_path / "saved.bin")
    with pytest.raises(ValueError, match="cannot be read as weights"):
        load_torch(tmp_path / "saved.bin", "cpu")


# --- archives -------------------------------------------------------------------------------------------------------------


def archive_of(value: Any) -> bytes:
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def twice(first: str, second: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Duplicate name")
        for name in (first, second):
            file.writestr(name, pickle.dumps(1, 2))
    return content.getvalue()


def with_a_comment() -> bytes:
    content = bytearray(archive_of(1))
    content[-2:] = struct.pack("<H", 3)
    return bytes(content) + b"end"


def corrupted(mark: bytes, offset: int, value: bytes) -> bytes:
    """Return an archive with bytes replaced at an offset from the last occurrence of a signature."""
    content = bytearray(twice("archive/version", "archive/data.pkl"))
    place = content.rindex(mark) + offset
    content[place : place + len(value)] = value
    return bytes(content)


ARCHIVES = {
    "compressed": lambda: archive(pickle.dumps(1, 2), bytes(10**6), zipfile.ZIP_DEFLATED),
    "after other bytes": lambda: archive_of(1)[:4] + archive_of(1),
    "with a comment": with_a_comment,
    "after another archive": lambda: archive_of([1]) + archive_of([2]),
    "with two pickles": lambda: twice("archive/data.pkl", "other/data.pkl"),
    "with two entries of the same name": lambda: twice("archive/data.pkl", "archive/data.pkl"),
    "with names that differ in case": lambda: twice("archive/data.pkl", "archive/DATA.pkl"),
    "with a corrupt local header": lambda: corrupted(b"PK\x03\x04", 0, b"KP"),
    "with a corrupt central directory": lambda: corrupted(b"PK\x01\x02", 0, b"KP"),
    "with a comment length beyond the central directory": lambda: corrupted(b"PK\x01\x02", 32, b"\x01"),
    "without a pickle": lambda: twice("archive/a", "archive/b"),
}


@pytest.mark.parametrize("make", ARCHIVES.values(), ids=ARCHIVES)
def test_an_ambiguous_archive_is_rejected(make: Callable[[], bytes]) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"archive|name"):
        load(io.BytesIO(make()))


def test_a_central_directory_must_be_where_torch_writes_it() -> None:
    content = bytearray(archive_of(1))
    locator = len(content) - 22 - 20  # torch always writes the zip64 records
    assert content[locator : locator + 4] == b"PK\x06\x07"
    check_torch_file(io.BytesIO(content))
    content[locator + 8] ^= 1
    with pytest.raises(pickle.UnpicklingError, match="not where torch writes it"):
        check_torch_file(io.BytesIO(content))


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_truncated_archive_is_rejected(cut: int) -> None:
    with pytest.raises((pickle.UnpicklingError, struct.error)):
        check_torch_file(io.BytesIO(archive_of({"a": torch.ones(3)})[:-cut]))
