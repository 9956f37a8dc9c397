"""The parts of a checkpoint of which each rank holds a share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from accelerate._base.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import sharded
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import LoadOptions, Part, Prepared, indexed, read_torch, read_weights
from accelerate.collectives import communicator
from accelerate.runtime import current
from accelerate.strategies.sharded_state import (
    StateDict,
    UnshardedParameters,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    write_shards,
)
from accelerate.strategies.tools import gather_full


class ShardedPart(ABC):
    """A state that all ranks hold together.

    In shards it is written by torch's distributed checkpoint, over a group of its own where training goes on
    meanwhile. Its ranks talk while they write, so these parts come first in a checkpoint: all ranks get to them.

    Args:
        key: The name of the state inside a folder of shards.
        stem: The name of its file, or of its folder with the index.
        full: Write one file with the full state, instead of shards.
    """

    everywhere = True

    def __init__(self, key: str, stem: str, index: int, *, full: bool) -> None:
        self.name = f"{key} {index}"
        self.key = key
        self.index = index
        self.full = full
        self.folder_name = f"{stem}_{index}"
        self.file_name = indexed(stem, index, ".bin")

    @abstractmethod
    def state(self) -> StateDict:
        """Return the state in shards."""

    def snapshot(self) -> Any:
        state, error = None, None
        try:
            state = self.state()
            if self.full:
                state = gather_full(state, keep=current.runtime().rank == 0)
        except Exception as caught:  # noqa: BLE001 - the others would wait for this rank while they write
            error = caught
        failed = [text for text in communicator().gather_object(None if error is None else repr(error)) if text]
        if failed:
            raise CheckpointError(f"The state of {self.name} cannot be collected: {failed[0]}.") from error
        return state

    def write(self, payload: Any, folder: FolderWriter) -> None:
        rank = current.runtime().rank
        if self.full:
            if rank == 0:
                folder.write_torch(self.file_name, payload)
            return
        target = folder.path / self.folder_name
        write_shards(payload, self.key, target, folder.process_group)
        for file in sorted(target.glob(f"__{rank}_*")):
            folder.add_written(file)
        if rank == 0:
            folder.add_written(target / sharded.METADATA)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        if sharded.is_sharded(folder / self.folder_name):
            path = folder / self.folder_name
            self.check(sharded.read_metadata(path), path)
            return path
        # A full state is sent from rank 0, so that the others need no memory for it.
        return self.read_file(folder, options) if current.runtime().rank == 0 else {}

    def read_file(self, folder: Path, options: LoadOptions) -> StateDict:
        """Return a state that was saved in full."""
        found: StateDict = read_torch(folder / self.file_name, options)
        return found

    def check(self, metadata: Any, path: Path) -> None:  # noqa: B027 - a part that has nothing to compare takes any shards
        """Raise a CheckpointError if shards are of something else."""

    @abstractmethod
    def restore(self, payload: Any) -> None:
        """Put a state that was read in place."""


class ShardedModelPart(ShardedPart):
    """A sharded model."""

    def __init__(self, model: nn.Module, index: int = 0, *, full: bool = False) -> None:
        super().__init__("model", FSDP_MODEL_NAME, index, full=full)
        self.model = model
        self._strict = True

    def state(self) -> StateDict:
        return model_state(self.model)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        self._strict = bool(options.model_kwargs.get("strict", True))
        return super().read(folder, options)

    def read_file(self, folder: Path, options: LoadOptions) -> StateDict:
        if (folder / self.file_name).is_file():
            return super().read_file(folder, options)
        # A checkpoint of a run that did not shard.
        found = read_weights(folder, self.index, options)
        for aliases in UnshardedParameters.of(self.model).tied:
            saved = next((name for name in aliases if name in found), None)
            if saved is not None:
                found.update(dict.fromkeys(aliases, found[saved]))
        return found

    def check(self, metadata: Any, path: Path) -> None:
        if not self._strict:
            return
        for name, shape in UnshardedParameters.of(self.model).shapes.items():
            entry = metadata.state_dict_metadata.get(f"{self.key}.{name}")
            saved = None if entry is None else tuple(getattr(entry, "size", ()))
            if saved != shape:
                raise CheckpointError(
                    f"The weights in {str(path)!r} are not those of this {type(self.model).__name__}: {name!r} has the "
                    f"shape {shape}, and there it {'is missing' if saved is None else f'has {saved}'}. Build the model as "
                    "it was when the checkpoint was saved."
                )

    def restore(self, payload: Any) -> None:
        load_model_state(self.model, payload, strict=self._strict)


class ShardedOptimizerPart(ShardedPart):
    """The optimizer of a sharded model.

    Args:
        stages: The ranks whose optimizers hold the parameters of other stages of a pipeline, written together.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
        index: int = 0,
        *,
        full: bool = False,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__("optimizer", OPTIMIZER_NAME, index, full=full)
        self.optimizer = optimizer
        self.model = model
        self.stages = stages

    def state(self) -> StateDict:
        state = optimizer_state(self.model, self.optimizer)
        if self.stages is not None:  # groups name the parameters of all stages
            found: list[Any] = [None] * self.stages.size()
            dist.all_gather_object(found, [group["params"] for group in state["param_groups"]], group=self.stages)
            for place, group in enumerate(state["param_groups"]):
                group["params"] = [name for stage in found for name in stage[place]]
        return state

    def restore(self, payload: Any) -> None:
        load_optimizer_state(self.model, self.optimizer, payload, is_stage=self.stages is not None)


def sharded_parts(prepared: Prepared, *, full: bool = False, stages: dist.ProcessGroup | None = None) -> list[Part]:
    """Return the parts of models and optimizers that all ranks write together.

    Args:
        full: Write full states instead of shards.
        stages: The ranks that hold the other stages of a pipeline.
    """
    parts: list[Part] = [ShardedModelPart(model, i, full=full) for i, model in enumerate(prepared.models)]
    for i, optimizer in enumerate(prepared.optimizers):
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = (model for model in prepared.models if any(id(item) in trained for item in model.parameters()))
        parts.append(ShardedOptimizerPart(optimizer, next(owners, prepared.models[0]), i, full=full, stages=stages))
    return parts
