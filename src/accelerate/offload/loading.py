"""Checkpoints read into a model, each weight straight to its place."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.collectives import communicator
from accelerate.collectives.base import Communicator
from accelerate.offload.converted import Wanted, write_converted
from accelerate.offload.places import DISK, HOST, META, Place, as_device, lookup
from accelerate.offload.progress import progress
from accelerate.offload.quantised import SCALES, is_4bit, offload_quantised, place_packed, scales_name, statistics_in
from accelerate.offload.sizes import resolve_dtype
from accelerate.offload.store import OffloadedWeightsLoader, save_offload_index
from accelerate.offload.tensors import check_shape, owner_of, set_module_tensor_to_device
from accelerate.offload.ties import find_tied_parameters, retie_parameters
from accelerate.offload.weight_files import Received, Shape, Weights, checkpoint_files, load_state_dict, open_weights

FilePath = str | os.PathLike[str]

COMPILED = "_orig_mod."
"""What a compiler's shell adds to the names inside it; the weights are those of the model without it."""


class Source(NamedTuple):
    """Where a weight was read: a file and the weight's name there."""

    weights: Weights
    name: str


def load_offloaded_weights(model: nn.Module, index: Mapping[str, Any] | None, offload_folder: FilePath) -> None:
    """Put the weights of an offload folder into a model on the CPU."""
    index = index or {}
    for name in [name for name in index if not name.endswith(SCALES)]:
        scales = scales_name(name)
        statistics = _copy_of(offload_folder, scales, index) if scales in index else None
        value = _copy_of(offload_folder, name, index)
        set_module_tensor_to_device(model, name, HOST, value=value, fp16_statistics=statistics)


def _copy_of(folder: FilePath, name: str, index: Mapping[str, Any]) -> torch.Tensor:
    # A copy, so that the folder may be removed or written again.
    return OffloadedWeightsLoader(save_folder=folder, index=index)[name].clone()


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
        self.plain = {name.replace(COMPILED, ""): name for name in self.known}
        self.loaded: dict[str, Source] = {}
        self.unexpected: list[str] = []
        self.to_convert: list[tuple[str, Wanted]] = []
        self.statistics: dict[str, list[str]] = {}

    def load(self, weights: Weights) -> None:
        """Place every weight of a file."""
        names = weights.names()
        present, self.statistics = set(names), statistics_in(names)
        beside = {name for group in self.statistics.values() for name in group}
        for name in names:
            if name.endswith(SCALES):
                continue  # read together with the weight that it scales
            target = name if name in self.known else self.plain.get(name.replace(COMPILED, ""))
            if target is None:
                if name not in beside:
                    self.unexpected.append(name)
                continue
            scales = scales_name(name)
            self._put(target, weights, name, scales if scales in present else None)
            self.loaded[target] = Source(weights, name)
        self._convert(weights)

    def load_twins(self, tied: Iterable[Sequence[str]]) -> None:
        """Place tied weights that a checkpoint holds under another name of their group only."""
        for group in tied:
            source = next((self.loaded[name] for name in group if name in self.loaded), None)
            for name in group if source is not None else ():
                if name not in self.loaded and source is not None:
                    self._put(name, source.weights, source.name, None)
                    self._convert(source.weights)
                    self.loaded[name] = source

    def _place(self, name: str) -> Place:
        place = lookup(self.device_map, name)
        if place is not None:
            return place
        held = self._held(name)
        return HOST if held is None or held.device == META else held.device

    def _held(self, name: str) -> torch.Tensor | None:
        owner, key = owner_of(self.model, name)
        return owner._parameters[key] if key in owner._parameters else owner._buffers.get(key)

    def _dtype(self, name: str) -> torch.dtype | None:
        kept = any(part in name for part in self.keep_in_fp32)
        return torch.float32 if kept and self.dtype == torch.float16 else self.dtype

    def _put(self, name: str, weights: Weights, source: str, scales: str | None) -> None:
        place, dtype = self._place(name), self._dtype(name)
        if place == DISK and (self.offload_buffers or name not in self.buffers):
            self._offload(name, weights, source, scales, dtype)
            return
        device = as_device(HOST if place == DISK else place)
        value = weights.read(source, device)
        if is_4bit(self._held(name)) and not value.is_floating_point():
            beside = {key: weights.read(key, device) for key in self.statistics.get(source, ())}
            place_packed(self.model, name, value, beside, device)
            return
        statistics = None if scales is None else weights.read(scales, as_device(HOST))
        set_module_tensor_to_device(
            self.model, name, device, value, dtype, fp16_statistics=statistics, clear_cache=False
        )

    def _offload(self, name: str, weights: Weights, source: str, scales: str | None, dtype: torch.dtype | None) -> None:
        if self.folder is None:
            raise ConfigurationError(
                f"{name!r} goes to the disk, and no offload_folder was given, so there is nowhere to write it. "
                "Pass offload_folder."
            )
        shape, stored = weights.shape(source)
        if self.quantise and scales is None and stored.is_floating_point:
            value = weights.read(source, as_device(HOST))
            offload_quantised(self.model, name, value, dtype, self.folder, self.index)
            return
        held = self._held(name)
        check_shape(name, held, shape)
        wanted = dtype if dtype is not None and stored.is_floating_point else stored
        self._note(name, weights, source, Shape(shape, wanted))
        if scales is not None:
            self._note(scales_name(name), weights, scales, weights.shape(scales))
        if held is None or held.device != META or (dtype is not None and held.dtype != wanted):
            set_module_tensor_to_device(self.model, name, META, dtype=dtype, clear_cache=False)

    def _note(self, name: str, weights: Weights, source: str, wanted: Shape) -> None:
        """Use a weight where it is, or see to it that it is converted.

        A smaller dtype is written once: every forward then reads fewer bytes, and needs no conversion. A larger one is
        made while the model runs: reading more bytes would take longer than converting.
        """
        stored = weights.shape(source).dtype
        if weights.in_place(source) and (wanted.dtype == stored or wanted.dtype.itemsize > stored.itemsize):
            self._index(name, weights.path, source, wanted.dtype)
        else:
            self.to_convert.append((name, Wanted(source, *wanted)))

    def _index(self, name: str, file: Path, source: str, dtype: torch.dtype) -> None:
        self.index[name] = {
            "safetensors_file": str(file.absolute()),
            "weight_name": source,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def _convert(self, weights: Weights) -> None:
        if not self.to_convert or self.folder is None:
            return
        # One name may be wanted for two tied weights, in one dtype.
        wanted = {weight.name: weight for _, weight in self.to_convert}
        host = as_device(HOST)
        file = write_converted(weights.path, self.folder, list(wanted.values()), lambda name: weights.read(name, host))
        for name, weight in self.to_convert:
            self._index(name, file, weight.name, weight.dtype)
        self.to_convert.clear()


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
        offload_folder: Where the index of weights on the disk is written, and those that cannot be used where they are:
            safetensors files are used in place, other formats and smaller dtypes are converted once.
        dtype: The dtype of floating-point weights in the model.
        offload_state_dict: Accepted for programs that ask for little memory: weights are always read one by one.
        offload_buffers: Write the buffers of modules on the disk too.
        keep_in_fp32_modules: Names of modules that stay in float32 when the rest becomes float16.
        offload_8bit_bnb: Quantise weights for the disk to 8 bits.
        strict: Raise if names of the checkpoint and of the model differ.
        full_state_dict: For a sharded model: the checkpoint holds whole tensors.
        broadcast_from_rank0: Only the first process reads, and sends the weights to the others.

    Raises:
        ConfigurationError: If the checkpoint is not found or does not fit, or weights have no folder to go to.
    """
    torch_dtype = None if dtype is None else resolve_dtype(dtype)
    group = _broadcasting_group() if broadcast_from_rank0 else None
    files = _agreed_files(checkpoint, group)
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
    with progress(len(files), "Loading checkpoint") as done:
        for file in files:
            loader.load(open_weights(file) if group is None else Received(file, group))
            done(1)
    loader.load_twins(tied)
    _report(model, loader.unexpected, sorted(loader.known - loader.loaded.keys()), strict)
    if offload_folder is not None:
        save_offload_index(loader.index, offload_folder)
    retie_parameters(model, tied)


def _broadcasting_group() -> Communicator | None:
    """Return what the first process sends weights over, or None where there is nobody to send them to."""
    group = communicator() if torch.distributed.is_available() and torch.distributed.is_initialized() else None
    return group if group is not None and group.world_size > 1 else None


def _agreed_files(checkpoint: FilePath, group: Communicator | None) -> list[Path]:
    """Return the files of a checkpoint, which only the first process has to see if it sends the weights."""
    if group is None:
        return checkpoint_files(checkpoint)
    found: list[Any] = [checkpoint_files(checkpoint) if group.rank == 0 else None]
    group.broadcast_objects(found)
    files: list[Path] = found[0]
    return files


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
    # A model cannot be sharded by a part of torch that was never imported, and importing it here would take a second.
    fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is not None and any(isinstance(module, fsdp) for module in model.modules()):
        return True
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and any(isinstance(parameter, dtensor) for parameter in model.parameters())


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
