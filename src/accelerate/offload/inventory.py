"""The tensors of a model by name, shape and dtype, found without reading their contents."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate.offload.safetensors_format import BITS, read_header

if TYPE_CHECKING:
    import torch
    from torch import nn

# Batch statistics, which a file does not tell from parameters.
_BUFFER_NAMES = ("running_mean", "running_var")
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
WEIGHT_SUFFIXES = (".safetensors", *_TORCH_SUFFIXES)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: what it is called, how large it is, and the layer that it belongs to.

    Args:
        bits: Bits of one element as it is stored.
        floating: Whether a change of dtype applies to it; integers and booleans keep their size.
        trainable: Whether an optimizer would have states for it.
        layer: The name of the part of the model that stays whole on a device.
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    floating: bool
    trainable: bool
    layer: str

    @cached_property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Its size as it is stored."""
        return -(-self.elements * self.bits // 8)


def is_weights(path: Path) -> bool:
    """Return whether a path names weights, or an index of them, by its ending."""
    return path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")


def weight_files(path: Path) -> list[Path]:
    """Return the files that hold the weights of a file, of an index or of a folder; none if a folder has no weights.

    Raises:
        ConfigurationError: If a shard that an index names is missing, or the index cannot be read.
    """
    if path.is_file():
        return _shards(path) if path.name.endswith(".index.json") else [path]
    for suffix in WEIGHT_SUFFIXES:
        indices = sorted(path.glob(f"*{suffix}.index.json"))
        if len(indices) == 1:
            return _shards(indices[0])
        found = sorted(file for file in path.glob(f"*{suffix}") if file.name not in _OTHER_FILES)
        if found:
            return _one_set(path, suffix, indices, found)
    return []


# What the Trainer and other programs put beside weights.
_OTHER_FILES = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt"})
_MAIN_NAMES = ("model", "pytorch_model", "diffusion_pytorch_model", "adapter_model")


def _one_set(path: Path, suffix: str, indices: list[Path], found: list[Path]) -> list[Path]:
    if len(found) == 1:
        return found
    for name in _MAIN_NAMES:
        if (path / f"{name}{suffix}").is_file():
            return [path / f"{name}{suffix}"]
    raise ConfigurationError(
        f"The folder {str(path)!r} holds {len(found)} {suffix} files and {len(indices)} index files, so it does not say "
        "which of them make up one model. Give the path of a file or of an index."
    )


def _shards(index_file: Path) -> list[Path]:
    index = _json(index_file, index_file.read_bytes(), "an index of shards")
    weight_map = index.get("weight_map", index)
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigurationError(
            f"{str(index_file)!r} is not an index of shards: 'weight_map' must map names of tensors to names of files. "
            "Give the folder of a model, or a weights file."
        )
    shards = [index_file.parent / name for name in sorted(set(weight_map.values()))]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ConfigurationError(
            f"The index {str(index_file)!r} names {missing[0]!r}, which is not beside it ({len(missing)} of "
            f"{len(shards)} shards are missing). Download the folder again."
        )
    return shards


def read_tensors(files: Iterable[Path]) -> list[TensorEntry]:
    """Return the tensors of weight files: the headers of safetensors, the structure of files that torch wrote.

    Raises:
        ConfigurationError: If a file is not what its ending says.
    """
    return [
        entry
        for file in files
        for entry in (_read_header(file) if file.suffix == ".safetensors" else _read_torch(file))
    ]


def _read_header(path: Path) -> list[TensorEntry]:
    return [_from_header(path, name, described) for name, described in read_header(path).tensors.items()]


def _from_header(path: Path, name: str, described: Any) -> TensorEntry:
    dtype, shape = (described.get("dtype"), described.get("shape")) if isinstance(described, dict) else (None, None)
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _broken(path, f"its header gives {name!r} no shape")
    if dtype not in BITS:
        raise _broken(path, f"its header gives {name!r} the dtype {dtype!r}, which is not known")
    return _from_file(name, tuple(shape), BITS[dtype], dtype.startswith(("F", "BF")))


def _from_file(name: str, shape: tuple[int, ...], bits: int, floating: bool) -> TensorEntry:
    trainable = floating and not name.endswith(_BUFFER_NAMES)
    return TensorEntry(name, shape, bits, floating, trainable, layer_of(name))


def layer_of(name: str) -> str:
    """Return the layer of a tensor by its name: up to the first number (`model.layers.3`), else its own module."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or name


def _read_torch(path: Path) -> list[TensorEntry]:
    import torch

    try:
        # On the meta device the storages are never read; only the zip format can also be mapped.
        state = torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigurationError(
            f"{str(path)!r} cannot be read as weights that torch saved ({_first_line(error)}). "
            "Give a file that holds a dictionary of tensors, or one in the safetensors format."
        ) from error
    tensors = _tensors_of(state)
    if not tensors:
        raise ConfigurationError(
            f"{str(path)!r} holds no tensors by name, but {type(state).__name__!r}. Give a file with a state dict."
        )
    unique = {_identity(tensor): (name, tensor) for name, tensor in reversed(tensors.items())}
    return [
        _from_file(name, tuple(tensor.shape), tensor.dtype.itemsize * 8, tensor.is_floating_point())
        for name, tensor in reversed(unique.values())
    ]


def _tensors_of(state: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, also of one that a checkpoint holds under the usual key."""
    import torch

    if not isinstance(state, Mapping):
        return {}
    found = {str(name): value for name, value in state.items() if isinstance(value, torch.Tensor)}
    inner = [state[key] for key in ("state_dict", "model") if key in state]
    return found if found or not inner else _tensors_of(inner[0])


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    # A tied weight is stored once, under several names.
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())


def tensors_of_model(model: nn.Module) -> list[TensorEntry]:
    """Return the parameters and buffers of a model, which may lie on the meta device; tied ones count once."""
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    whole: list[str] = []
    for name, module in model.named_modules():
        inside = whole and (name == whole[-1] or name.startswith(f"{whole[-1]}."))
        if name and not inside and (type(module).__name__ in no_split or next(module.children(), None) is None):
            whole.append(name)
    layers = set(whole)
    return [
        *(
            _from_model(name, tensor, layers, trainable=tensor.requires_grad)
            for name, tensor in model.named_parameters()
        ),
        *(_from_model(name, tensor, layers, trainable=False) for name, tensor in model.named_buffers()),
    ]


def _from_model(name: str, tensor: torch.Tensor, layers: set[str], *, trainable: bool) -> TensorEntry:
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(1, len(parts)))
    layer = next((prefix for prefix in prefixes if prefix in layers), name)
    return TensorEntry(
        name, tuple(tensor.shape), tensor.dtype.itemsize * 8, tensor.is_floating_point(), trainable, layer
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        ConfigurationError: If it is not JSON, or not an object.
    """
    return _json(path, path.read_bytes(), "a JSON object")


def _json(path: Path, text: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _broken(path, f"{what} is expected in it ({_first_line(error)})") from error
    if not isinstance(value, dict):
        raise _broken(path, f"{what} is expected in it, not {type(value).__name__!r}")
    return value


def _broken(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"{str(path)!r} cannot be read: {why}. Save or download it again, or give another file.")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
