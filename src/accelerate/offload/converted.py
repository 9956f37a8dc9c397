"""Weights that cannot be used where they are, written once to a file that can: another format, or a smaller dtype."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.offload.mapped import ALIGNMENT
from accelerate.offload.progress import progress
from accelerate.offload.safetensors_format import (
    SafetensorsHeader,
    dtype_name,
    make_header,
    read_header,
    tensor_bytes,
)
from accelerate.runtime.atomic import atomic_file

SUFFIX = ".offload.safetensors"


@dataclass(frozen=True)
class Wanted:
    """One weight as it is to be written.

    Args:
        name: Its name in the file that it is read from, and in the one that is written.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in the new file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_converted(
    source: Path, folder: str | os.PathLike[str], weights: Sequence[Wanted], read: Callable[[str], torch.Tensor]
) -> Path:
    """Write weights of a file to a safetensors file in a folder, unless they are there already, and return its path.

    The file gets its name when it is complete. Its data are aligned as torch aligns memory.

    Args:
        read: Gives the weight of a name on the CPU.

    Raises:
        ConfigurationError: If a dtype has no name in the format.
    """
    target = Path(folder).absolute() / f"{source.stem}{SUFFIX}"
    header = _header(source, weights)
    if source.is_file() and _is_there(target, header):
        return target
    dtypes = {weight.name: weight.dtype for weight in weights}
    total = sum(weight.nbytes for weight in weights)
    with (
        atomic_file(target) as partial,
        partial.open("wb") as file,
        progress(total, "Writing weights for the disk", unit="B") as done,
    ):
        file.write(header.to_bytes())
        for name in header.tensors:
            tensor = read(name).to(dtypes[name])
            if tensor.numel():
                file.write(tensor_bytes(tensor))
            done(tensor.nbytes)
    return target


def _header(source: Path, weights: Sequence[Wanted]) -> SafetensorsHeader:
    origin = {"source": str(source.absolute())}
    if source.is_file():  # another process may read it for this one
        status = source.stat()
        origin |= {"size": str(status.st_size), "modified": str(status.st_mtime_ns)}
    for weight in weights:
        if dtype_name(weight.dtype) is None:
            raise ConfigurationError(
                f"{weight.name!r} of {str(source)!r} has the dtype {weight.dtype!r}, which a safetensors file cannot "
                "hold, so it cannot be offloaded to the disk. Pass dtype= to load the checkpoint in another one."
            )
    shapes = {weight.name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for weight in weights}
    return make_header(shapes, {"format": "pt", **origin}, alignment=ALIGNMENT)


def _is_there(target: Path, header: SafetensorsHeader) -> bool:
    """Return whether an earlier run wrote the same weights of the same file."""
    with suppress(ConfigurationError, OSError):
        return read_header(target) == header and target.stat().st_size == header.file_size
    return False
