"""Checkpoints read into a model, each weight straight to its place."""

from __future__ import annotations

import json
import os
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from .._base.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from .._base.errors import ConfigurationError
from .places import DISK, HOST, META, Place, as_device, lookup
from .quantised import SCALES, offload_quantised, scales_name
from .sizes import resolve_dtype
from .store import load_offloaded_weight, offload_weight, save_offload_index
from .tensors import owner_of, set_module_tensor_to_device
from .ties import find_tied_parameters, retie_parameters

FilePath = str | os.PathLike[str]


class Weights(Protocol):
    """Weights of one file, each read when it is asked for."""

    def names(self) -> list[str]:
        """Return the names in the file."""

    def read(self, name: str, device: torch.device) -> Any:
        """Return one weight on a device."""


class _SafetensorsFile:
    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._path, self._safe_open = path, safe_open
        self._handles: dict[str, Any] = {}
        written = (self._handle("cpu").metadata() or {}).get("format", "pt")
        if written != "pt":
            raise ConfigurationError(
                f"{str(path)!r} was written for {written!r}, so its tensors may be laid out differently. "
                "Save it again from torch, which writes the metadata {'format': 'pt'}."
            )

    def _handle(self, device: str) -> Any:
        if device not in self._handles:
            self._handles[device] = self._safe_open(self._path, framework="pt", device=device)
        return self._handles[device]

    def names(self) -> list[str]:
        return list(self._handle("cpu").keys())

    def read(self, name: str, device: torch.device) -> Any:
        if device == META:
            return self._handle("cpu").get_tensor(name).to(META)
        return self._handle(str(device)).get_tensor(name)


class _TorchFile:
    def __init__(self, path: Path) -> None:
        # Only the zip format, which torch has written since 1.6, can be mapped instead of read whole.
        mapped = zipfile.is_zipfile(path)
        self._state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        self._mapped = mapped

    def names(self) -> list[str]:
        return list(self._state)

    def read(self, name: str, device: torch.device) -> Any:
        value = self._state[name]
        if not isinstance(value, torch.Tensor):
            return value
        # A copy, so that the model does not depend on the file once it is loaded.
        return value.clone() if device.type == "cpu" and self._mapped else value.to(device)


def open_weights(path: FilePath) -> Weights:
    """Open a `.safetensors` file, or a file that `torch.save` wrote, whose code is never run."""
    file = Path(path)
    return _SafetensorsFile(file) if file.suffix == ".safetensors" else _TorchFile(file)


def load_state_dict(checkpoint_file: FilePath, device_map: Mapping[str, Place] | None = None) -> dict[str, Any]:
    """Return the weights of a file.

    Args:
        device_map: Where each module's weights go; those for the disk, and all without a map, go to the CPU.

    Raises:
        ConfigurationError: If a safetensors file was not written for torch.
    """
    weights = open_weights(checkpoint_file)
    return {name: weights.read(name, _reading_device(device_map, name)) for name in weights.names()}


def _reading_device(device_map: Mapping[str, Place] | None, name: str) -> torch.device:
    place = lookup(device_map, name) if device_map else None
    return as_device(HOST if place is None or place == DISK else place)


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: FilePath) -> None:
    """Put the weights of an offload folder into a model on the CPU."""
    index = index or {}
    for name in [name for name in index if not name.endswith(SCALES)]:
        scales = scales_name(name)
        statistics = _read_raw(offload_folder, scales, index) if scales in index else None
        value = _read_raw(offload_folder, name, index)
        set_module_tensor_to_device(model, name, HOST, value=value, fp16_statistics=statistics)


def _read_raw(folder: FilePath, name: str, index: Mapping[str, Any]) -> torch.Tensor:
    # A copy, so that the folder may be removed or written again.
    return load_offloaded_weight(Path(folder) / f"{name}.dat", index[name]).clone()


def checkpoint_files(checkpoint: FilePath) -> list[Path]:
    """Return the files of a checkpoint, which is a weights file, an index of shards, or a folder with one of these.

    Raises:
        ConfigurationError: If there is none, or the folder has several to choose from.
    """
    path = Path(checkpoint)
    if path.is_file():
        return _shards(path) if path.suffix == ".json" else [path]
    if not path.is_dir():
        raise ConfigurationError(
            f"There is no checkpoint at {str(checkpoint)!r}: it is neither a file nor a folder. "
            "Give a weights file, an index of shards, or the folder that holds them."
        )
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        if (path / name).is_file():
            return [path / name]
    indices = sorted(path.glob("*.index.json"))
    if len(indices) == 1:
        return _shards(indices[0])
    raise ConfigurationError(
        f"The folder {str(checkpoint)!r} holds {len(indices)} index files and neither {WEIGHTS_NAME} nor "
        f"{SAFE_WEIGHTS_NAME}, so it does not say what to load. Give the path of the file or index itself."
    )


def _shards(index_file: Path) -> list[Path]:
    index = json.loads(index_file.read_text(encoding="utf-8"))
    names = sorted(set(index.get("weight_map", index).values()))
    return [index_file.parent / name for name in names]


class _Loader:
    """Put the weights of all files of one checkpoint where a device map says."""

    def __init__(
        self,
        model: nn.Module,
        device_map: Mapping[str, Place],
        folder: FilePath | None,
        dtype: torch.dtype | None,
        offload_buffers: bool,
        keep_in_fp32: Iterable[str],
        quantise: bool,
    ) -> None:
        self.model, self.device_map, self.folder, self.dtype = model, device_map, folder, dtype
        self.offload_buffers, self.keep_in_fp32, self.quantise = offload_buffers, tuple(keep_in_fp32), quantise
        self.index: dict[str, Any] = {}
        self.buffers = {name for name, _ in model.named_buffers()}
        self.known = set(model.state_dict())
        self.loaded: dict[str, Path] = {}
        self.unexpected: list[str] = []

    def load(self, file: Path) -> None:
        """Place every weight of a file."""
        weights = open_weights(file)
        names = weights.names()
        present = set(names)
        for name in names:
            if name.endswith(SCALES):
                continue  # read together with the weight that it scales
            if name not in self.known:
                self.unexpected.append(name)
                continue
            scales = scales_name(name)
            self._put(name, weights, name, weights.read(scales, as_device(HOST)) if scales in present else None)
            self.loaded[name] = file

    def load_twins(self, tied: Iterable[Sequence[str]]) -> None:
        """Place tied weights that a checkpoint holds under another name of their group only."""
        for group in tied:
            source = next((name for name in group if name in self.loaded), None)
            for name in group if source is not None else ():
                if name not in self.loaded and source is not None:
                    self._put(name, open_weights(self.loaded[source]), source, None)
                    self.loaded[name] = self.loaded[source]

    def _place(self, name: str) -> Place:
        place = lookup(self.device_map, name)
        if place is not None:
            return place
        owner, key = owner_of(self.model, name)
        held = owner._parameters.get(key) if key in owner._parameters else owner._buffers.get(key)
        return HOST if held is None or held.device == META else held.device

    def _dtype(self, name: str) -> torch.dtype | None:
        kept = any(part in name for part in self.keep_in_fp32)
        return torch.float32 if kept and self.dtype == torch.float16 else self.dtype

    def _put(self, name: str, weights: Weights, source: str, statistics: torch.Tensor | None) -> None:
        place, dtype = self._place(name), self._dtype(name)
        if place != DISK or (name in self.buffers and not self.offload_buffers):
            device = as_device(HOST if place == DISK else place)
            value = weights.read(source, device)
            set_module_tensor_to_device(
                self.model, name, device, value, dtype, fp16_statistics=statistics, clear_cache=False
            )
            return
        value = weights.read(source, as_device(HOST))
        if self.folder is None:
            raise ConfigurationError(
                f"{name!r} goes to the disk, and no offload_folder was given, so there is nowhere to write it. "
                "Pass offload_folder."
            )
        if self.quantise and statistics is None and value.is_floating_point():
            offload_quantised(self.model, name, value, dtype, self.folder, self.index)
            return
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        offload_weight(value, name, self.folder, self.index)
        if statistics is not None:
            offload_weight(statistics, scales_name(name), self.folder, self.index)
        set_module_tensor_to_device(self.model, name, META, dtype=dtype, clear_cache=False)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: FilePath,
    device_map: Mapping[str, Place] | None = None,
    offload_folder: FilePath | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, each weight to its place in the device map.

    Args:
        checkpoint: A weights file, an index of shards, or a folder with one of these.
        device_map: The place of each module; without it, each weight goes where the model's tensor is.
        offload_folder: Where weights for the disk are written.
        dtype: The dtype of floating-point weights in the model.
        offload_state_dict: Accepted for programs that ask for little memory: weights are always read one by one.
        offload_buffers: Write the buffers of modules on the disk too.
        keep_in_fp32_modules: Names of modules that stay in float32 when the rest becomes float16.
        offload_8bit_bnb: Quantise weights for the disk to 8 bits.
        strict: Raise if names of the checkpoint and of the model differ.
        full_state_dict: For a sharded model: the checkpoint holds whole tensors.
        broadcast_from_rank0: For a sharded model: only the first process reads.

    Raises:
        ConfigurationError: If the checkpoint is not found or does not fit, or weights have no folder to go to.
    """
    torch_dtype = None if dtype is None else resolve_dtype(dtype)
    files = checkpoint_files(checkpoint)
    if device_map is None and _is_sharded(model):
        _load_sharded(model, files, torch_dtype, strict, full_state_dict, broadcast_from_rank0)
        return
    if offload_folder is not None:
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
    tied = find_tied_parameters(model)
    places = dict(device_map or {})
    loader = _Loader(
        model, places, offload_folder, torch_dtype, offload_buffers, keep_in_fp32_modules or (), offload_8bit_bnb
    )
    for file in files:
        loader.load(file)
    loader.load_twins(tied)
    _report(model, loader.unexpected, sorted(loader.known - loader.loaded.keys()), strict)
    if offload_folder is not None:
        save_offload_index(loader.index, offload_folder)
    retie_parameters(model, tied)


def _report(model: nn.Module, unexpected: list[str], missing: list[str], strict: bool) -> None:
    if strict and (unexpected or missing):
        raise ConfigurationError(
            f"The checkpoint does not fit {type(model).__name__}: not in the model {unexpected!r}, not in the "
            f"checkpoint {missing!r}. Load the checkpoint of this model, or pass strict=False."
        )
    if unexpected:
        warnings.warn(
            f"These weights of the checkpoint are not in {type(model).__name__} and were not used: {unexpected!r}.",
            stacklevel=3,
        )


def _is_sharded(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return True
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _load_sharded(
    model: nn.Module,
    files: list[Path],
    dtype: torch.dtype | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict and len(files) == 1
    )
    for file in files:
        read = not broadcast_from_rank0 or torch.distributed.get_rank() == 0
        state = load_state_dict(file) if read else {}
        if dtype is not None:
            state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
        set_model_state_dict(model, state, options=options)
