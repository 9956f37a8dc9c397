"""Write the weights of a model for other programs to load: whole or in shards, from memory or from where they are offloaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate._base.errors import CheckpointError, UsageError, WrongTypeError
from accelerate._base.imports import is_torch_version
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.weight_folder import SAFETENSORS, TORCH, WeightFolder, WeightFormat, is_weights_of
from accelerate.offload.loading import COMPILED
from accelerate.offload.memory import convert_file_size_to_int
from accelerate.offload.safetensors_format import identity_in_memory, shared_names, warn_of_dropped_names
from accelerate.offload.store import (
    OffloadedWeight,
    OffloadedWeightsLoader,
    offloaded_weights,
    scales_name,
)
from accelerate.offload.weight_files import save_offload_index


@dataclass(frozen=True)
class WeightToWrite:
    """One weight to write: its shape and dtype are known at once, its data is read when it is written."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    identity: Hashable | None


@dataclass(frozen=True)
class ModelWeights:
    """What a model has to write: its weights, and the entries of its state dict that are no tensors.

    Args:
        elsewhere: Those of the weights that are offloaded.
    """

    tensors: Mapping[str, WeightToWrite]
    others: Mapping[str, Any]
    elsewhere: Mapping[str, OffloadedWeight] = field(default_factory=dict)


def weights_of(model: nn.Module, state_dict: Mapping[str, Any]) -> ModelWeights:
    """Return what there is to write of a model, under names without the compiler's additions.

    Args:
        state_dict: The weights of the model, where those that are offloaded have no data.

    Raises:
        UsageError: If a weight has no data anywhere.
    """
    elsewhere = offloaded_weights(model)
    tensors: dict[str, WeightToWrite] = {}
    empty = []
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.device.type != "meta":
            weight = WeightToWrite(value.shape, value.dtype, value.detach, identity_in_memory(value))
            tensors[name.replace(COMPILED, "")] = weight
        elif name in elsewhere:
            stored = elsewhere[name]
            weight = WeightToWrite(stored.like.shape, stored.like.dtype, stored.read, stored.identity)
            tensors[name.replace(COMPILED, "")] = weight
        else:
            empty.append(name)
    if empty:
        raise UsageError(
            f"{empty!r} of {type(model).__name__} are on the meta device and no hook says where their data is, so there "
            "is nothing to save. Load weights into the model first."
        )
    others = {name: value for name, value in state_dict.items() if not isinstance(value, torch.Tensor)}
    return ModelWeights(tensors, others, {name.replace(COMPILED, ""): elsewhere[name] for name in elsewhere})


def save_weights(
    weights: ModelWeights,
    folder: WeightFolder,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write weights into a folder, in place of those that an earlier save wrote there in either format.

    They are written beside the old ones and then put in their place, so a save that fails or is killed leaves weights
    that are whole: the old ones or the new ones. Other files in the folder stay. Offloaded weights are read one shard at
    a time. A model that runs from safetensors files that were replaced by others runs from these.

    Args:
        max_shard_size: The size from which weights are spread over several files; a larger single weight has a file of
            its own.
        safe_serialization: Write safetensors, where a weight has one name; otherwise torch files, where all names stay.

    Raises:
        CheckpointError: If the folder cannot be written.
        ConfigurationError: If the size cannot be read.
        WrongTypeError: If the state dict holds what safetensors cannot.
    """
    if safe_serialization and weights.others:
        raise WrongTypeError(
            f"The entries {sorted(weights.others)!r} of the state dict are no tensors, and safetensors holds nothing "
            "else. Write safe_serialization=False."
        )
    kind = SAFETENSORS if safe_serialization else TORCH
    shared = shared_names({name: weight.identity for name, weight in weights.tensors.items()})
    files, index = _plan(weights, shared, kind, convert_file_size_to_int(max_shard_size))
    if safe_serialization:
        warn_of_dropped_names(shared)
    try:
        with folder.claimed():
            _write_and_publish(weights, folder, kind, files, index, shared)
    except OSError as error:
        raise CheckpointError(
            f"The weights could not be written to {str(folder)!r}: {error}. What an earlier save left there "
            "can still be read. Make room or choose another folder, and save again."
        ) from error


def _write_and_publish(
    weights: ModelWeights,
    folder: WeightFolder,
    kind: WeightFormat,
    files: Mapping[str, list[str]],
    index: Mapping[str, Any] | None,
    shared: Mapping[str, str],
) -> None:
    with folder.stage() as stage, closing(FolderWriter(stage)) as staged:
        for number, (file, names) in enumerate(files.items()):
            # Read, written and forgotten before the next: one shard is all that is in memory.
            if kind is SAFETENSORS:
                staged.write_tensors(file, {name: weights.tensors[name].read() for name in names}, {"format": "pt"})
            else:
                others = weights.others if number == 0 else {}
                staged.write_torch(file, {**_torch_shard(weights, names, shared), **others})
                if is_torch_version("<", "2.10"):
                    gc.collect()  # before that, `torch.save` leaves what it wrote in a cycle of references
            folder.take(stage / file, staged.finish)
        staged.finish()
    folder.publish(kind, list(files), index)
    if kind is SAFETENSORS and folder.path is not None:
        _follow_replaced_files(weights, folder.path, files, shared)


def _follow_replaced_files(
    weights: ModelWeights, folder: Path, files: Mapping[str, list[str]], shared: Mapping[str, str]
) -> None:
    """Let the model read its offloaded weights from the files that took the place of theirs."""
    written = {name: str((folder / file).absolute()) for file, names in files.items() for name in names}
    moved: dict[int, tuple[OffloadedWeightsLoader, dict[str, Any]]] = {}
    for name, weight in weights.elsewhere.items():
        if weight.store is None or name not in weights.tensors:
            continue
        store, key = weight.store
        _, listed, entry = store.origin(key)
        path = entry.get("safetensors_file") if isinstance(entry, Mapping) else None
        # Weights in 8 bits are read with scales, which have no name in the model.
        if path is None or scales_name(key) in store or not is_weights_of(Path(path), folder):
            continue
        owner = shared.get(name, name)
        dtype = str(weights.tensors[name].dtype).removeprefix("torch.")
        entries = moved.setdefault(id(store), (store, {}))[1]
        entries[listed] = {"safetensors_file": written[owner], "weight_name": owner, "dtype": dtype}
    for store, entries in moved.values():
        store.replace(entries)
        if store.save_folder is not None:
            save_offload_index(entries, store.save_folder)


def _plan(
    weights: ModelWeights, shared: Mapping[str, str], kind: WeightFormat, limit: int
) -> tuple[dict[str, list[str]], dict[str, Any] | None]:
    """Return which weights each file holds, and the index of the files if they are several."""
    from huggingface_hub import split_torch_state_dict_into_shards

    # Without data, and each of its own: a weight that is a part of a larger one takes the bytes that are written.
    owners = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        for name, weight in weights.tensors.items()
        if name not in shared
    }
    split = split_torch_state_dict_into_shards(owners, filename_pattern=kind.pattern, max_shard_size=limit)
    files = split.filename_to_tensors or {kind.single: []}
    if kind is TORCH:
        for name, owner in shared.items():
            files[split.tensor_to_filename[owner]].append(name)
    if len(files) == 1:
        return files, None
    weight_map = {name: file for file, names in files.items() for name in names}
    return files, {"metadata": split.metadata, "weight_map": weight_map}


def _torch_shard(weights: ModelWeights, names: list[str], shared: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return tensors under all their names, in the order of the state dict, so that a file holds their data once."""
    read = {name: _compact(weights.tensors[name].read()) for name in names if name not in shared}
    return {name: read[shared.get(name, name)] for name in weights.tensors if shared.get(name, name) in read}


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    # A torch file holds the whole memory behind a tensor, also what belongs to others.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
