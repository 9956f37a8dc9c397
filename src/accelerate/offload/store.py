"""The folder and the mappings from which offloaded weights are read."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.offload.mapped import FoundWeight, OpenFiles
from accelerate.offload.places import Place, as_device
from accelerate.offload.sizes import resolve_dtype
from accelerate.offload.tensors import identity_in_memory
from accelerate.runtime.atomic import atomic_file

WeightInfo: TypeAlias = Mapping[str, Any]
"""How one weight is stored: `dtype` and `shape` of a raw file, or `safetensors_file`, `weight_name` and `dtype`."""

INDEX_NAME = "index.json"


def _raw_file(folder: str | os.PathLike[str], weight_name: str) -> Path:
    return Path(folder) / f"{weight_name}.dat"


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: MutableMapping[str, Any] | None = None,
) -> MutableMapping[str, Any] | None:
    """Write the bytes of a weight to its own file, and note its dtype and shape in `index`."""
    data = weight.detach().cpu().contiguous().reshape(-1)
    data.view(torch.uint8).numpy().tofile(_raw_file(offload_folder, weight_name))
    if index is not None:
        index[weight_name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    return index


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: WeightInfo) -> torch.Tensor:
    """Return the weight of a raw file.

    The file is mapped, so its bytes are read when they are used; writing to the tensor does not change the file.
    """
    found = OpenFiles().find_raw(weight_file, tuple(weight_info["shape"]), resolve_dtype(weight_info["dtype"]))
    return found.tensor


def read_offload_index(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the entries of a folder's index."""
    index: dict[str, Any] = json.loads((Path(folder) / INDEX_NAME).read_text(encoding="utf-8"))
    return index


def has_offload_index(folder: str | os.PathLike[str] | None) -> bool:
    """Return whether a folder holds offloaded weights."""
    return folder is not None and (Path(folder) / INDEX_NAME).is_file()


def save_offload_index(index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to the index of a folder; nothing happens for an empty index."""
    if not index:
        return
    merged = read_offload_index(offload_folder) if has_offload_index(offload_folder) else {}
    merged.update(index)
    with atomic_file(Path(offload_folder) / INDEX_NAME) as partial:
        partial.write_text(json.dumps(merged, indent=2), encoding="utf-8")


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every weight of a state dict to a folder, with its index."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the entries that are one of the given names or lie below one."""
    wanted = set(submodule_names)
    if "" in wanted:
        return dict(state_dict)
    return {name: weight for name, weight in state_dict.items() if _lies_below(name, wanted)}


def _lies_below(name: str, wanted: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in wanted for end in range(1, len(parts) + 1))


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
        save_folder: str | os.PathLike[str] | None = None,
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
        self._files = OpenFiles()
        self.all_keys = list(dict.fromkeys((*self.state_dict, *self.index)))
        self.aliases: dict[str, str] = {}

    def add_aliases(self, groups: Iterable[Sequence[str]]) -> None:
        """Let names of tied weights be read that are stored under another name of their group only."""
        for group in groups:
            stored = next((name for name in group if name in self.state_dict or name in self.index), None)
            if stored is not None:
                self.aliases.update({name: stored for name in group if name not in self})
        self.all_keys = list(dict.fromkeys((*self.all_keys, *self.aliases)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": None}  # a mapping belongs to one process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _files=OpenFiles())

    def __getitem__(self, key: str) -> torch.Tensor:
        found = self.find(key, self._files)
        if found.file is None:
            return found.tensor
        found.file.check()
        device = None if self.device is None or not self._is_in_safetensors(key) else as_device(self.device)
        return found.tensor.to(device, found.dtype)

    def _is_in_safetensors(self, key: str) -> bool:
        return self.index[self.aliases.get(key, key)].get("safetensors_file") is not None

    def origin(self, key: str) -> tuple[Mapping[str, Any], str, Any]:
        """Return the table that a weight is listed in, its name there, and its entry."""
        key = self.aliases.get(key, key)
        table: Mapping[str, Any] = self.state_dict if key in self.state_dict else self.index
        return table, key, table[key]

    def find(self, key: str, files: OpenFiles) -> FoundWeight:
        """Return a weight as it is stored, with what is known about it.

        Args:
            files: Where the files that are mapped for it are kept.

        Raises:
            KeyError: If there is no such weight.
            ConfigurationError: If its file is missing, cut off or another one.
        """
        key = self.aliases.get(key, key)
        if key in self.state_dict:
            held = self.state_dict[key]
            return FoundWeight(held, held.dtype)
        entry: WeightInfo = self.index[key]
        if entry.get("safetensors_file") is not None:
            dtype = resolve_dtype(entry["dtype"]) if "dtype" in entry else None
            return files.find_in_safetensors(entry["safetensors_file"], entry.get("weight_name", key), dtype)
        if self.save_folder is None:
            raise ConfigurationError(
                f"The index has {key!r} as a raw file, and no save_folder says where that file lies. "
                "Pass the folder that the weights were offloaded to."
            )
        return files.find_raw(_raw_file(self.save_folder, key), tuple(entry["shape"]), resolve_dtype(entry["dtype"]))

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
