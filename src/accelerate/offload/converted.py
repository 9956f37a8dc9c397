"""Weights that cannot be used where they are, written once to a file that can: another format, or a smaller dtype."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.offload.inventory import read_safetensors_header
from accelerate.offload.mapped import ALIGNMENT, SAFETENSORS_NAMES
from accelerate.offload.progress import progress

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
    staged = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        _write(staged, header, _tensors(weights, read), sum(weight.nbytes for weight in weights))
        staged.replace(target)
    except BaseException:
        with suppress(OSError):
            staged.unlink()
        raise
    return target


def _in_file_order(weights: Iterable[Wanted]) -> list[Wanted]:
    # Wide elements first: every tensor then begins at a multiple of its element size.
    return sorted(weights, key=lambda weight: -weight.dtype.itemsize)


def _header(source: Path, weights: Sequence[Wanted]) -> dict[str, Any]:
    origin = {"source": str(source.absolute())}
    if source.is_file():  # another process may read it for this one
        status = source.stat()
        origin |= {"size": str(status.st_size), "modified": str(status.st_mtime_ns)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **origin}}
    position = 0
    for weight in _in_file_order(weights):
        if weight.dtype not in SAFETENSORS_NAMES:
            raise ConfigurationError(
                f"{weight.name!r} of {str(source)!r} has the dtype {weight.dtype!r}, which a safetensors file cannot "
                "hold, so it cannot be offloaded to the disk. Pass dtype= to load the checkpoint in another one."
            )
        header[weight.name] = {
            "dtype": SAFETENSORS_NAMES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [position, position + weight.nbytes],
        }
        position += weight.nbytes
    return header


def _is_there(target: Path, header: dict[str, Any]) -> bool:
    """Return whether an earlier run wrote the same weights of the same file."""
    if not target.is_file():
        return False
    with suppress(ConfigurationError, OSError):
        found, start = read_safetensors_header(target)
        end = start + max(
            (entry["data_offsets"][1] for key, entry in found.items() if key != "__metadata__"), default=0
        )
        return found == header and target.stat().st_size == end
    return False


def _tensors(weights: Iterable[Wanted], read: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
    for weight in _in_file_order(weights):
        yield read(weight.name).to(weight.dtype).contiguous()


def _write(path: Path, header: dict[str, Any], tensors: Iterable[torch.Tensor], total: int) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file, progress(total, "Writing weights for the disk", unit="B") as done:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            if tensor.numel():
                tensor.reshape(-1).view(torch.uint8).numpy().tofile(file)
            done(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())  # a crash must not leave a whole name on half a file
