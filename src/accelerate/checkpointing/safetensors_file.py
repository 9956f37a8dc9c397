"""Write safetensors piece by piece, without a copy of the tensors.

The package's own writer takes whole files from memory and copies each tensor on the way; it is three times slower, and
leaves no place to sum the bytes as they are written. Reading is left to the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from accelerate._base.errors import WrongTypeError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_ALIGNMENT = 8


class Sink(Protocol):
    """What is written to."""

    def write(self, data: memoryview | bytes, /) -> int:
        """Write all of `data`."""


Fetch = Callable[[Iterable[str]], Iterable[tuple[str, torch.Tensor]]]


def write(
    file: Sink, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], fetch: Fetch | None = None
) -> None:
    """Write tensors that share no memory.

    Args:
        fetch: Returns the tensors in the order asked for, where `tensors` have no memory; one at a time is needed.

    Raises:
        WrongTypeError: (a TypeError) if an entry is no tensor, or of a dtype that the format does not have.
    """
    # Wide types first, as the package does: every tensor is then aligned to its own size.
    order = sorted(tensors, key=lambda name: (-_itemsize(name, tensors[name]), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in fetch(order) if fetch is not None else ((name, tensors[name]) for name in order):
        if tensor.numel():
            file.write(_bytes(tensor))


def _itemsize(name: str, tensor: object) -> int:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise WrongTypeError(
            f"The entry {name!r} is a {kind}, which safetensors cannot hold. Write safe_serialization=False."
        )
    return tensor.element_size()


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
