"""Give the weights of a prepared model away: as a state dict, as a file, as a folder that other programs load."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from accelerate.checkpointing.export import save_weights, weights_of
from accelerate.checkpointing.torch_files import save
from accelerate.checkpointing.weight_folder import open_folder
from accelerate.config.plugins.training import ProjectConfiguration
from accelerate.hooks.offloaded import get_state_dict_offloaded_model, offloaded_weights
from accelerate.parallel.unwrap import extract_model_from_parallel
from accelerate.runtime import current
from accelerate.strategies.base import Strategy


class ExportMixin:
    """Write models and objects that are no checkpoint of the run."""

    project_configuration: ProjectConfiguration
    strategy: Strategy

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights of a prepared model; those that are offloaded are read to the CPU.

        Args:
            model: A model as `prepare` returned it.
            unwrap: Leave out what `prepare` put around the model, and its part of the names.
        """
        inner = extract_model_from_parallel(model) if unwrap else model
        if offloaded_weights(inner):
            return get_state_dict_offloaded_model(inner)
        return self.strategy.full_state_dict(model, unwrap=unwrap)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model into a folder that `load_checkpoint_in_model` and Transformers load from.

        All processes may call it; the main one writes, or the first of each machine if the project is configured so.
        Where weights are sharded over processes, all have to. It waits for nobody.

        Args:
            model: A model as `prepare` returned it, or one with offloaded weights: these are read one shard at a time.
            save_directory: A folder, or an address of fsspec such as `"s3://bucket/folder"`. Weights of an earlier save,
                in either format, are replaced; other files stay.
            max_shard_size: The size of the largest file, such as `"5GB"`; a larger single weight has its own.
            safe_serialization: Write safetensors; otherwise files of torch.

        Raises:
            CheckpointError: If the folder cannot be written; what was there before can still be read.
            ConfigurationError: If `save_directory` is a file.
            MissingPackageError: If the package for an address is not installed.
            UsageError: If weights have no data.
        """
        folder = open_folder(save_directory)
        weights = weights_of(extract_model_from_parallel(model), self.strategy.full_state_dict(model))
        if self._writes_files():
            save_weights(weights, folder, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file once per run, or once per machine if the project is configured so.

        Args:
            obj: What to save.
            f: Path of the file.
            safe_serialization: Write safetensors; `obj` must be a mapping of names to tensors.
        """
        save(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )

    def _writes_files(self) -> bool:
        runtime = current.runtime()
        return (runtime.local_rank if self.project_configuration.save_on_each_node else runtime.rank) == 0
