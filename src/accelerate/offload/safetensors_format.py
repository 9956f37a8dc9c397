"""The safetensors format: its dtypes and its header, files written as a stream, and tensors that share memory.

The package of that name writes whole files from memory and copies each tensor on the way: it is three times slower, and
leaves no place to sum bytes as they are written. This module is imported where torch is not: it loads torch when it is
used.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate._base.helpers import log_once
from accelerate._base.untrusted import MOST_BYTES, check_regular, first_line, is_shape, is_whole, parse_json, shown
from accelerate.devices import registry

if TYPE_CHECKING:
    import torch

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}
"""The bits of one element, by the format's name of a dtype."""
_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
METADATA = "__metadata__"
_LENGTH_BYTES = 8


def torch_dtype(name: str) -> torch.dtype | None:
    """Return torch's dtype for a name of the format; None if this torch has none."""
    import torch

    found: torch.dtype | None = getattr(torch, _TORCH_NAMES.get(name, ""), None)
    return found


@functools.cache
def _names() -> dict[torch.dtype, str]:
    found = {torch_dtype(name): name for name in _TORCH_NAMES}
    return {dtype: name for dtype, name in found.items() if dtype is not None}


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the format's name of a dtype; None if the format cannot hold it."""
    return _names().get(dtype)


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file says of itself.

    Args:
        tensors: Name of a tensor -> its `dtype`, `shape` and `data_offsets`.
        metadata: What the writer added.
        data_start: Where the data begins in the file.
    """

    tensors: dict[str, Any]
    metadata: dict[str, str]
    data_start: int

    @property
    def file_size(self) -> int:
        """The bytes of the whole file."""
        return self.data_start + max((entry["data_offsets"][1] for entry in self.tensors.values()), default=0)

    def to_bytes(self) -> bytes:
        """Return the header as it stands at the beginning of the file."""
        text = json.dumps({METADATA: self.metadata, **self.tensors}, separators=(",", ":")).encode()
        text = text.ljust(self.data_start - _LENGTH_BYTES)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> SafetensorsHeader:
    """Return the header of a file, in which every tensor has a dtype, a shape and a place of its own that fit together.

    Raises:
        ConfigurationError: If the file does not begin with such a header.
    """
    size = check_regular(path).st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little") if len(start) == _LENGTH_BYTES else 0
        # The format's own limit; a longer header is a sign that the file is something else.
        if not 0 < length <= MOST_BYTES:
            raise _broken(path, "it does not begin with the length of a header")
        text = file.read(min(length, size))
    if len(text) < length:
        raise _broken(path, f"its header has {length} bytes and the file ends after {len(text)} of them")
    try:
        found = parse_json(text)
    except ValueError as error:
        raise _broken(path, f"a safetensors header is expected in it ({first_line(error)})") from error
    if not isinstance(found, dict):
        raise _broken(path, f"a safetensors header is expected in it, not {type(found).__name__!r}")
    metadata = found.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _broken(path, f"its header has the metadata {shown(metadata)}, which are not names with texts")
    _check_tensors(path, found)
    return SafetensorsHeader(found, metadata, _LENGTH_BYTES + length)


def _check_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    for name, entry in tensors.items():
        problem = _problem(entry)
        if problem is not None:
            raise _broken(path, f"its header gives {shown(name)} {problem}")
    end = 0
    for begin, stop in sorted(tuple(entry["data_offsets"]) for entry in tensors.values()):
        if begin != end:
            raise _broken(path, f"the tensors of its header leave out or share bytes at {min(begin, end)}")
        end = stop


def _problem(entry: Any) -> str | None:
    """Return what is wrong with what a header says of a tensor."""
    described: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (described.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(shape, list) or not is_shape(shape):
        return "no shape"
    if not isinstance(dtype, str):
        return "no dtype"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_whole, offsets)):
        return "no place"
    nbytes = offsets[1] - offsets[0]
    if nbytes < 0 or (dtype in BITS and math.prod(shape) * BITS[dtype] != nbytes * 8):
        return f"{nbytes} bytes, which do not fit the dtype {shown(dtype)} and the shape {shown(shape)}"
    return None


def _broken(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"{str(path)!r} cannot be read: {why}. Save or download it again, or give another file.")


def make_header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], *, alignment: int = 8
) -> SafetensorsHeader:
    """Lay out a file.

    Args:
        tensors: What it will hold, in dtypes that the format has; only shapes and dtypes are looked at.
        alignment: The data begins at a multiple of this.
    """
    entries: dict[str, Any] = {}
    end = 0
    # Wide types first, as the package does: every tensor is then aligned to its own size.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    plain = SafetensorsHeader(entries, dict(metadata), 0)
    length = len(plain.to_bytes())
    return SafetensorsHeader(entries, dict(metadata), length + -length % alignment)


class ByteSink(Protocol):
    """What is written to."""

    def write(self, data: memoryview | bytes, /) -> int:
        """Write all of `data`."""


ReadTensors = Callable[[Iterable[str]], Iterable[tuple[str, "torch.Tensor"]]]


def write_safetensors(
    file: ByteSink, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], read: ReadTensors | None = None
) -> None:
    """Write tensors that share no memory, one after another and without a copy.

    Args:
        read: Returns the tensors in the order asked for, where `tensors` have no memory; one at a time is needed.

    Raises:
        WrongTypeError: (a TypeError) if an entry is no tensor, or of a dtype that the format does not have.
    """
    import torch

    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or dtype_name(tensor.dtype) is None:
            kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise WrongTypeError(
                f"The entry {name!r} is a {kind}, which safetensors cannot hold. Write safe_serialization=False."
            )
    header = make_header(tensors, metadata)
    file.write(header.to_bytes())
    for _, tensor in read(header.tensors) if read is not None else ((name, tensors[name]) for name in header.tensors):
        if tensor.numel():
            file.write(tensor_bytes(tensor))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor that is not empty; its own memory where it is contiguous on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def identity_in_memory(tensor: torch.Tensor) -> Hashable | None:
    """Return what two names of one tensor have in common, None for a tensor without data.

    Different parts of one memory are different tensors.
    """
    if tensor.is_meta or tensor.numel() == 0:
        return None
    address = tensor.data_ptr() or registry.get(tensor.device).identity(tensor)
    return tensor.device, address, tensor.dtype, tensor.shape, tensor.stride()


def shared_names(identities: Mapping[str, Hashable | None]) -> dict[str, str]:
    """Return the further names of tensors that have several, each with the first name of its tensor.

    Args:
        identities: What the names of one tensor have in common; None for a tensor that has one name only.
    """
    owners: dict[Hashable, str] = {}
    firsts = {name: owners.setdefault(key, name) for name, key in identities.items() if key is not None}
    return {name: first for name, first in firsts.items() if name != first}


def warn_of_dropped_names(names: Iterable[str]) -> None:
    """Say once that names of shared tensors are left out of a file."""
    if dropped := list(names):
        log_once(
            __name__, f"These tensors share memory with others and are saved under the first name only: {dropped}."
        )


def drop_shared_names(state_dict: dict[str, Any]) -> list[str]:
    """Leave one name of each tensor that has several, make tensors contiguous, in place, and return what was dropped.

    Different parts of one memory are different tensors: they are copied.
    """
    import torch

    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    dropped = shared_names({name: identity_in_memory(tensor) for name, tensor in tensors.items()})
    storages: dict[tuple[torch.device, int], str] = {}
    for name, tensor in tensors.items():
        if name in dropped:
            del state_dict[name]
            continue
        packed = state_dict[name] = tensor.contiguous()
        if packed.device.type == "meta" or packed.numel() == 0:
            continue
        storage = (packed.device, packed.untyped_storage().data_ptr())
        if storages.setdefault(storage, name) != name:
            state_dict[name] = packed.clone()
    return list(dropped)


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Leave one name of each tensor that has several, and make tensors contiguous, in place.

    safetensors refuses shared memory; the names that are dropped are tied again when the weights are loaded.
    """
    warn_of_dropped_names(drop_shared_names(state_dict))
    return state_dict
