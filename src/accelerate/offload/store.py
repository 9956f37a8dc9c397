"""The files that weights are read from by name: offload folders with their index, and the files of checkpoints."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import log_once
from accelerate.collectives.base import Communicator
from accelerate.offload.places import DISK, HOST, META, Place, as_device, lookup, prefixes
from accelerate.offload.safetensors_format import identity_in_memory, tensor_bytes
from accelerate.offload.stored import FilePath, RawFile, SafetensorsFile, StoredTensor
from accelerate.offload.tensors import is_empty, resolve_dtype
from accelerate.offload.weight_files import (
    check_noted,
    load_torch,
    raw_path,
    read_offload_index,
    save_offload_index,
)
from accelerate.runtime.atomic import partial_name

WeightInfo: TypeAlias = Mapping[str, Any]
"""How one weight is stored: `dtype` and `shape` of a raw file, or `safetensors_file`, `weight_name` and `dtype`."""

OpenFiles: TypeAlias = dict[str, SafetensorsFile | RawFile]
"""The weight files that are mapped, each once, by path."""

BESIDE_WEIGHTS = ("SCB", "weight_format")
"""The last parts of names of what is stored beside a quantised weight, and read with it: its scales and its layout."""

_COMPARED = 1000
"""How many elements at each end of a weight tell whether it is another one."""


def scales_name(weight_name: str) -> str:
    """Return the name of the scales that belong to a weight; the empty name for other tensors, which have none."""
    return f"{weight_name.removesuffix('weight')}SCB" if weight_name.endswith("weight") else ""


def quantisation_statistics(names: Iterable[str]) -> dict[str, list[str]]:
    """Return, for each weight in 4 bits of a file, the names of what is stored beside it: `"layer.weight.absmax"`."""
    present = set(names)
    found: dict[str, list[str]] = {}
    for name in present:
        layer, dot, _ = name.rpartition(".weight.")
        weight = f"{layer}.weight" if dot else "weight"
        if weight in present and name.startswith(f"{weight}."):
            found.setdefault(weight, []).append(name)
    return found


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: FilePath,
    index: MutableMapping[str, Any] | None = None,
) -> MutableMapping[str, Any] | None:
    """Write the bytes of a weight to its own file, and note its dtype and shape in `index`.

    Raises:
        ConfigurationError: If the name, which may come from a checkpoint, leads out of the folder.
    """
    data = tensor_bytes(weight) if weight.numel() else b""
    file = raw_path(offload_folder, weight_name)
    # Another process may have mapped a file of this name: it keeps what it has, and a change of its memory would end it.
    if not (file.is_file() and file.stat().st_size == len(data) and file.read_bytes() == data):
        partial = file.with_name(partial_name(file.name))
        try:
            partial.write_bytes(data)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: FilePath, weight_info: WeightInfo) -> torch.Tensor:
    """Return the weight of a raw file.

    The file is mapped, so its bytes are read when they are used; writing to the tensor does not change the file.
    """
    return RawFile(weight_file, tuple(weight_info["shape"]), resolve_dtype(weight_info["dtype"])).find().tensor


def offload_state_dict(save_dir: FilePath, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every weight of a state dict to a folder, with its index.

    Raises:
        ConfigurationError: If the name of a weight leads out of the folder.
    """
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


def warn_of_other_weights(folder: FilePath, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Say once that a folder, which is used as it is, holds other weights than a model in memory.

    The beginning and the end of each weight are compared, so that a large folder is not read twice. A model that was made
    without its parameters is not meant to have any of its own.
    """
    if any(map(is_empty, state_dict.values())):
        return
    stored = OffloadedWeightsLoader(save_folder=folder)
    found = {name: weight for name, weight in state_dict.items() if name in stored.index}
    others = [name for name, weight in found.items() if not _begin_and_end_alike(weight, stored[name])]
    if others:
        log_once(
            __name__,
            f"{os.fspath(folder)!r} has an index, so its weights are used, and {len(others)} of {len(found)} are not those "
            f"of the model ({others[0]!r} first). Give an empty folder to run the model with its own.",
        )


def _begin_and_end_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    pairs = zip(*((flat[:_COMPARED], flat[-_COMPARED:]) for flat in (first.flatten(), second.flatten())), strict=True)
    return not first.numel() or all(tensor_bytes(one) == tensor_bytes(two.to(one.dtype)) for one, two in pairs)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries that are one of the given names or lie below one."""
    wanted = set(submodule_names)
    return {name: weight for name, weight in state_dict.items() if not wanted.isdisjoint(prefixes(name))}


class PrefixedDataset(Mapping[str, Any]):
    """Read a mapping from a sub-module's point of view: its names get a prefix on the way in."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return iter([key for key in self.dataset if key.startswith(self.prefix)])

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Read weights by name, each when it is asked for, from memory, from a folder or from an index.

    Args:
        state_dict: Weights that are in memory.
        save_folder: A folder that `offload_state_dict` wrote.
        index: Entries on top of the folder's own index; they may point into safetensors files.
        device: Where weights of safetensors files are read to; the CPU if not given.

    Raises:
        ConfigurationError: If there is nothing to read from.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: FilePath | None = None,
        index: Mapping[str, Any] | None = None,
        device: Place | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ConfigurationError(
                "No source was given (state_dict=None, save_folder=None, index=None), so there are no weights to "
                "read. Pass at least one of them."
            )
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None and save_folder is not None:
            index = read_offload_index(save_folder)
        self.index: Mapping[str, Any] = {} if index is None else index
        self.device = device
        self.version = 0
        self._files: OpenFiles = {}
        self.all_keys = list(dict.fromkeys((*self.state_dict, *self.index)))
        self.aliases: dict[str, str] = {}

    def add_aliases(self, groups: Iterable[Sequence[str]]) -> None:
        """Let names of tied weights be read that are stored under another name of their group only."""
        for group in groups:
            stored = next((name for name in group if name in self.state_dict or name in self.index), None)
            if stored is not None:
                self.aliases.update({name: stored for name in group if name not in self})
        self.all_keys = list(dict.fromkeys((*self.all_keys, *self.aliases)))

    def replace(self, weights: Mapping[str, torch.Tensor | WeightInfo]) -> None:
        """Let weights be read from somewhere else: each is in memory now, or where an entry of an index says.

        What reads ahead of this store sees by `version` that it has to begin anew.
        """
        stored = {self.aliases.get(name, name): weight for name, weight in weights.items()}
        in_memory = {name: weight for name, weight in stored.items() if isinstance(weight, torch.Tensor)}
        in_files = {name: weight for name, weight in stored.items() if name not in in_memory}
        self.state_dict = {name: self.state_dict[name] for name in self.state_dict if name not in stored} | in_memory
        self.index = {name: self.index[name] for name in self.index if name not in stored} | in_files
        self.all_keys = list(dict.fromkeys((*self.all_keys, *stored)))
        self._files = {}  # a file may be another one under its name now
        self.version += 1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}  # a mapping belongs to one process

    def __getitem__(self, key: str) -> torch.Tensor:
        stored = self.find(key, self._files)
        if stored.file is None:
            return stored.tensor
        stored.file.check()
        in_safetensors = isinstance(stored.file, SafetensorsFile)
        device = as_device(self.device) if self.device is not None and in_safetensors else None
        return stored.tensor.to(device, stored.dtype)

    def origin(self, key: str) -> tuple[Mapping[str, Any], str, Any]:
        """Return the table that a weight is listed in, its name there, and its entry."""
        key = self.aliases.get(key, key)
        table: Mapping[str, Any] = self.state_dict if key in self.state_dict else self.index
        return table, key, table[key]

    def find(self, key: str, files: OpenFiles) -> StoredTensor:
        """Return where a weight is stored.

        Args:
            files: Gets the files that are mapped for it.

        Raises:
            KeyError: If there is no such weight.
            ConfigurationError: If its file is missing, cut off or another one.
        """
        key = self.aliases.get(key, key)
        if key in self.state_dict:
            return StoredTensor.in_memory(self.state_dict[key])
        entry: WeightInfo = self.index[key]
        path = entry.get("safetensors_file")
        if path is not None:
            file = files.get(os.fspath(path))
            if not isinstance(file, SafetensorsFile):
                check_noted(path, entry)
                file = files[os.fspath(path)] = SafetensorsFile(path)
            return file.find(entry.get("weight_name", key), resolve_dtype(entry["dtype"]) if "dtype" in entry else None)
        if self.save_folder is None:
            raise ConfigurationError(
                f"The index has {key!r} as a raw file, and no save_folder says where that file lies. "
                "Pass the folder that the weights were offloaded to."
            )
        path = os.fspath(raw_path(self.save_folder, key))
        raw = files.get(path)
        if not isinstance(raw, RawFile):
            raw = files[path] = RawFile(path, tuple(entry["shape"]), resolve_dtype(entry["dtype"]))
        return raw.find()

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index or key in self.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def identity(self, key: str) -> Hashable:
        """Return what two names of one weight have in common, without reading it."""
        key = self.aliases.get(key, key)
        if key in self.state_dict:
            return identity_of_stored(self.state_dict, key)
        entry: WeightInfo = self.index[key]
        file = entry.get("safetensors_file")
        return (id(self), key) if file is None else (os.fspath(file), entry.get("weight_name", key))


def identity_of_stored(weights: Mapping[str, torch.Tensor], key: str) -> Hashable | None:
    """Return what two names of one stored weight have in common; None where only reading them would tell."""
    if isinstance(weights, PrefixedDataset):
        return identity_of_stored(weights.dataset, f"{weights.prefix}{key}")
    if isinstance(weights, OffloadedWeightsLoader):
        return weights.identity(key)
    return identity_in_memory(weights[key]) if isinstance(weights, dict) else None


@dataclass(frozen=True)
class OffloadedWeight:
    """One weight that is elsewhere: read when it is asked for, and known as the same under all its names.

    Args:
        like: What the model has in its place: shape and dtype without data.
    """

    source: Mapping[str, torch.Tensor]
    key: str
    like: torch.Tensor

    def read(self) -> torch.Tensor:
        """Return the weight on the CPU in the dtype that the model has it in; one of a file is mapped where it can be."""
        value = self.source[self.key].detach().cpu()
        return value.to(self.like.dtype) if value.is_floating_point() else value

    @property
    def identity(self) -> Hashable | None:
        """Return what two names of one stored weight have in common, None where that cannot be told."""
        return identity_of_stored(self.source, self.key)

    @property
    def store(self) -> tuple[OffloadedWeightsLoader, str] | None:
        """Return the store that the weight is read from, with its name there; None for a mapping of another kind."""
        source, key = self.source, self.key
        while isinstance(source, PrefixedDataset):
            key = f"{source.prefix}{key}"
            source = source.dataset
        return (source, key) if isinstance(source, OffloadedWeightsLoader) else None


class OffloadingHook(Protocol):
    """What keeps the weights of a module elsewhere while it does not run, and reads them from `weights_map`."""

    offload: bool
    weights_map: Mapping[str, torch.Tensor] | None
    place_submodules: bool


def offloading_hook(module: nn.Module) -> OffloadingHook | None:
    """Return the hook that offloads a module's weights, also where it is one of several."""
    pending: list[Any] = [getattr(module, "_hf_hook", None)]
    while pending:
        hook = pending.pop()
        if getattr(hook, "offload", None) is True and hasattr(hook, "weights_map"):
            found: OffloadingHook = hook
            return found
        pending += reversed(getattr(hook, "hooks", ()))
    return None


def offloaded_weights(model: nn.Module) -> dict[str, OffloadedWeight]:
    """Return the weights of a model that its hooks keep elsewhere, by the names of its state dict."""
    found: dict[str, OffloadedWeight] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        hook = offloading_hook(module)
        if hook is None or hook.weights_map is None:
            continue
        below = hook.place_submodules
        parameters = module.named_parameters(recurse=below, remove_duplicate=False)
        for key, tensor in chain(parameters, module.named_buffers(recurse=below, remove_duplicate=False)):
            if is_empty(tensor) and key in hook.weights_map:
                found[f"{prefix}.{key}" if prefix else key] = OffloadedWeight(hook.weights_map, key, tensor)
    return found


class WeightsFile(Protocol):
    """A file of a checkpoint, whose weights are read one by one.

    Attributes:
        in_place: Whether an index may point at the weights in this very file.
    """

    path: Path
    in_place: bool

    def names(self) -> list[str]:
        """Return the names in the file."""

    def like(self, name: str) -> Any:
        """Return a tensor without data that is like a weight of the file, without reading it; what is no tensor as it is."""

    def read(self, name: str, device: torch.device) -> Any:
        """Return one weight on a device."""


class TorchFile:
    """The weights of a file that `torch.save` wrote, whose code is never run."""

    in_place = False

    def __init__(self, path: Path) -> None:
        self.path = path
        state, self._mapped = load_torch(path, HOST)
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ConfigurationError(
                f"The weights file {str(path)!r} holds {type(state).__name__!r}, which is no dictionary of weights by name. "
                "Give a file with a state dict."
            )
        self._state: dict[str, Any] = state

    def names(self) -> list[str]:
        return list(self._state)

    def like(self, name: str) -> Any:
        if not isinstance(self._state[name], torch.Tensor):
            return self._state[name]
        return torch.empty(self._state[name].shape, dtype=self._state[name].dtype, device=META)

    def read(self, name: str, device: torch.device) -> Any:
        value = self._state[name]
        if not isinstance(value, torch.Tensor):
            return value
        # A copy, because `torch.save` to the same path would pull the pages away under the model.
        return value.clone() if device.type == HOST and self._mapped else value.to(device)


class BroadcastFile:
    """The weights of a file that the first process reads and sends to all others.

    All processes ask for the same weights in the same order.
    """

    in_place = False

    def __init__(self, path: Path, group: Communicator) -> None:
        self.path, self._group = path, group
        self._file = open_weights_file(path) if group.rank == 0 else None
        listed: list[Any] = [None]
        if self._file is not None:
            listed = [{name: self._file.like(name) for name in self._file.names()}]
        group.broadcast_objects(listed)
        self._like: dict[str, Any] = listed[0]

    def names(self) -> list[str]:
        return list(self._like)

    def like(self, name: str) -> Any:
        return self._like[name]

    def read(self, name: str, device: torch.device) -> Any:
        if not isinstance(self._like[name], torch.Tensor):
            return self._like[name]
        if self._file is not None:
            value: torch.Tensor = self._file.read(name, as_device(HOST)).contiguous()
        else:
            value = torch.empty_like(self._like[name], device=HOST)
        sent: torch.Tensor = self._group.broadcast(value).to(device)
        return sent


def open_weights_file(path: FilePath) -> WeightsFile:
    """Open a `.safetensors` file, or a file that `torch.save` wrote, whose code is never run.

    Raises:
        ConfigurationError: If the file is missing or broken, or a safetensors file was not written for torch.
    """
    file = Path(path)
    return SafetensorsFile(file) if file.suffix == ".safetensors" else TorchFile(file)


def load_state_dict(checkpoint_file: FilePath, device_map: Mapping[str, Place] | None = None) -> dict[str, Any]:
    """Return the weights of a file.

    Args:
        device_map: Where each module's weights go; those for the disk, and all without a map, go to the CPU.

    Raises:
        ConfigurationError: If the file is missing or broken, or a safetensors file was not written for torch.
    """
    file = open_weights_file(checkpoint_file)
    places = {name: lookup(device_map, name) if device_map else None for name in file.names()}
    return {
        name: file.read(name, as_device(HOST if place is None or place == DISK else place))
        for name, place in places.items()
    }
