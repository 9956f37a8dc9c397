"""The weights of a model that every rank holds whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import names, sharded
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.parts.base import LoadOptions, read_torch
from accelerate.checkpointing.parts.host_copy import host_copy
from accelerate.offload.safetensors_format import drop_shared_names
from accelerate.offload.tensors import identity_in_memory
from accelerate.parallel.unwrap import extract_model_from_parallel

_SHOWN = 3


class WeightsPart:
    """Weights that are at hand, to be written."""

    everywhere = False

    def __init__(self, weights: Mapping[str, Any] | None, index: int = 0, *, safe_serialization: bool = True) -> None:
        self.name = f"model {index}"
        self.index = index
        self._weights = weights
        self._safe = safe_serialization

    def weights(self) -> Mapping[str, Any]:
        """Return the weights by name."""
        return self._weights if self._weights is not None else {}

    def snapshot(self, *, copy: bool) -> Any:
        weights = self.weights()
        return host_copy(weights) if copy else weights

    def write(self, payload: Any, folder: StagedFolder) -> None:
        file = names.model_file(self.index, safe=self._safe)
        if self._safe:
            weights = dict(payload)
            drop_shared_names(weights)  # they are tied again when the weights are read
            folder.write_tensors(file, weights, {"format": "pt"})
        else:
            folder.write_torch(file, payload)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        safe = folder / names.model_file(self.index, safe=True)
        if not safe.is_file():
            return self._read_other(folder, options)
        try:
            return load_file(safe, device=str(options.map_location))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{str(safe)!r} cannot be read ({error}), so it is probably broken. Use another checkpoint."
            ) from error

    def _read_other(self, folder: Path, options: LoadOptions) -> Any:
        """Return weights that were not saved as safetensors: by torch, or by a run that shards."""
        shards, gathered = folder / names.sharded_model(self.index), folder / names.gathered_model_file(self.index)
        if sharded.is_sharded(shards):
            return sharded.read_whole(shards)["model"]
        if gathered.is_file():
            return read_torch(gathered, options)
        return read_torch(folder / names.model_file(self.index, safe=False), options)

    def _place(self, folder: Path) -> Path:
        """Return the file or folder that the weights are read from, for messages."""
        files = [names.model_file(self.index, safe=True), names.model_file(self.index, safe=False)]
        return next((folder / name for name in files if (folder / name).is_file()), folder)

    def restore(self, payload: Any) -> None:
        self._weights = payload


class ModelPart(WeightsPart):
    """A model."""

    def __init__(self, model: torch.nn.Module, index: int = 0, *, safe_serialization: bool = True) -> None:
        super().__init__(None, index, safe_serialization=safe_serialization)
        # Without a compiled shell, so that names do not depend on whether a run compiles.
        self.model = extract_model_from_parallel(model, keep_torch_compile=False)
        self._keywords: Mapping[str, Any] = {}

    def weights(self) -> Mapping[str, Any]:
        return self.model.state_dict()

    def read(self, folder: Path, options: LoadOptions) -> Any:
        self._keywords = options.model_kwargs
        found = dict(super().read(folder, options))
        own = self.weights()
        _give_all_names(found, own)
        if self._keywords.get("strict", True):
            self._check(own, found, folder)
        return found

    def _check(self, own: Mapping[str, Any], found: Mapping[str, Any], folder: Path) -> None:
        missing = [f"{name!r} is missing" for name in own if name not in found]
        unknown = [f"{name!r} is not in the model" for name in found if name not in own]
        shapes = [
            f"{name!r} has the shape {tuple(value.shape)} instead of {tuple(own[name].shape)}"
            for name, value in found.items()
            if isinstance(own.get(name), torch.Tensor) and own[name].shape != value.shape
        ]
        if reasons := [*missing, *unknown, *shapes]:
            more = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
            raise CheckpointError(
                f"The weights of {self.name} in {str(self._place(folder))!r} are not those of this "
                f"{type(self.model).__name__}: "
                f"{', '.join(reasons[:_SHOWN])}{more}. Build the model as it was when the checkpoint was saved, or write "
                "load_state(..., strict=False) to take over what fits."
            )

    def restore(self, payload: Any) -> None:
        self.model.load_state_dict(payload, **self._keywords)


def _give_all_names(found: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Enter a tensor that the model has under several names, and the file under one of them, under all."""
    groups: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, value in own.items():
        identity = identity_in_memory(value) if isinstance(value, torch.Tensor) else None
        if identity is not None:
            groups[identity].append(name)
    for group in groups.values():
        saved = next((name for name in group if name in found), None)
        if saved is not None:
            found.update({name: found[saved] for name in group if name not in found})
