"""The parts of a checkpoint of which each rank holds a share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from accelerate._base.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import names, sharded
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.parts.base import LoadOptions, read_torch
from accelerate.checkpointing.parts.host_copy import host_copy
from accelerate.checkpointing.parts.later import Later, copied_before_step
from accelerate.checkpointing.parts.weights import WeightsPart
from accelerate.collectives import communicator
from accelerate.runtime import current
from accelerate.runtime.runtime import Runtime
from accelerate.strategies.fsdp.filling import fill_from_first
from accelerate.strategies.fsdp.optimizer_state import load_optimizer_state, optimizer_state
from accelerate.strategies.fsdp.originals import Originals
from accelerate.strategies.fsdp.state_files import FULL, kind_of


class Holder(Protocol):
    """A strategy under which ranks hold a state together."""

    plugin: Any
    runtime: Runtime

    def originals(self, model: nn.Module) -> Originals:
        """Return the parameters of a model as the user knows them."""


@dataclass
class _Snapshot:
    """A state as it is written: whole on the first rank, or in shards over a group."""

    state: dict[str, Any]
    is_whole: bool
    group: dist.ProcessGroup | None = None


class ShardedPart(ABC):
    """A state that all ranks hold together.

    In shards it is written by torch's distributed checkpoint, over a group of its own where training goes on
    meanwhile. Its ranks talk while they write, so these parts come first in a checkpoint: all ranks get to them.

    Args:
        strategy: The strategy that shards.
        key: The name of the state inside a folder of shards.
        stem: The name of its file, or of its folder with the index.
    """

    everywhere = True

    def __init__(self, strategy: Holder, key: str, stem: str, index: int) -> None:
        self.name = f"{key} {index}"
        self.strategy = strategy
        self.key = key
        self.index = index
        self.folder_name = f"{stem}_{index}"
        self.file_name = names.indexed(stem, index, ".bin")

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state in shards."""

    def snapshot(self, *, copy: bool) -> Any:
        is_whole = kind_of(self.strategy.plugin) == FULL
        group = None
        if copy and not is_whole and current.runtime().is_distributed:
            group = current.remember("sharded save group", _own_group)
        snapshot, error = None, None
        try:
            state = self.state()
            state = whole(state, keep=current.runtime().rank == 0) if is_whole else state
            if copy:
                snapshot = self.copied(state, lambda state: _Snapshot(_copy(state), is_whole, group))
            else:
                snapshot = _Snapshot(state, is_whole)
        except Exception as caught:  # noqa: BLE001 - the others would wait for this rank while they write
            error = caught
        failed = [text for text in communicator().gather_object(None if error is None else repr(error)) if text]
        if failed:
            raise CheckpointError(f"The state of {self.name} cannot be collected: {failed[0]}.") from error
        return snapshot

    def copied(self, state: dict[str, Any], copy: Callable[[Any], _Snapshot]) -> _Snapshot | Later:
        """Return a copy of the state, or the promise of one."""
        return copy(state)

    def write(self, payload: Any, folder: StagedFolder) -> None:
        rank = current.runtime().rank
        if payload.is_whole:
            if rank == 0:
                folder.write_torch(self.file_name, payload.state)
            return
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        target = folder.path / self.folder_name
        with sharded.alone():
            save({self.key: payload.state}, storage_writer=FileSystemWriter(target), process_group=payload.group)
        for file in sorted(target.glob(f"__{rank}_*")):
            folder.adopt(file)
        if rank == 0:
            folder.adopt(target / sharded.METADATA)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        if sharded.is_sharded(folder / self.folder_name):
            path = folder / self.folder_name
            self.check(sharded.read_metadata(path), path)
            return path
        # A whole state is sent from the first rank, so that the others need no memory for it.
        return self.read_file(folder, options) if current.runtime().rank == 0 else {}

    def read_file(self, folder: Path, options: LoadOptions) -> dict[str, Any]:
        """Return a state that was saved whole."""
        found: dict[str, Any] = read_torch(folder / self.file_name, options)
        return found

    def check(self, metadata: Any, path: Path) -> None:  # noqa: B027 - a part that has nothing to compare takes any shards
        """Raise a CheckpointError if shards are of something else."""

    @abstractmethod
    def restore(self, payload: Any) -> None:
        """Put a state that was read in place."""


class ShardedModelPart(ShardedPart):
    """A sharded model."""

    def __init__(self, strategy: Holder, model: nn.Module, index: int = 0) -> None:
        super().__init__(strategy, "model", FSDP_MODEL_NAME, index)
        self.model = model
        self._strict = True

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(self.model)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        self._strict = bool(options.model_kwargs.get("strict", True))
        return super().read(folder, options)

    def read_file(self, folder: Path, options: LoadOptions) -> dict[str, Any]:
        if (folder / self.file_name).is_file():
            return super().read_file(folder, options)
        # A checkpoint of a run that did not shard.
        found = dict(WeightsPart(None, self.index).read(folder, options))
        for aliases in self.strategy.originals(self.model).tied:
            saved = next((name for name in aliases if name in found), None)
            if saved is not None:
                found.update(dict.fromkeys(aliases, found[saved]))
        return found

    def check(self, metadata: Any, path: Path) -> None:
        if not self._strict:
            return
        prefix = f"{self.key}."
        for name, value in self.strategy.originals(self.model).shapes.items():
            entry = metadata.state_dict_metadata.get(prefix + name)
            saved = None if entry is None else tuple(getattr(entry, "size", ()))
            if saved != value:
                raise CheckpointError(
                    f"The weights in {str(path)!r} are not those of this {type(self.model).__name__}: {name!r} has the "
                    f"shape {value}, and there it {'is missing' if saved is None else f'has {saved}'}. Build the model as "
                    "it was when the checkpoint was saved."
                )

    def restore(self, payload: Any) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

        if isinstance(payload, Path):
            boxed = {self.key: get_model_state_dict(self.model)}
            sharded.load_into(boxed, payload)
            set_model_state_dict(self.model, boxed[self.key], options=StateDictOptions(strict=self._strict))
            return
        held = get_model_state_dict(self.model)
        present = {} if self._strict else whole(held, keep=current.runtime().rank == 0)
        fill_from_first(held, {**present, **payload})
        set_model_state_dict(self.model, held, options=StateDictOptions(strict=self._strict))


class ShardedOptimizerPart(ShardedPart):
    """The optimizer of a sharded model."""

    def __init__(self, strategy: Holder, optimizer: Any, model: nn.Module, index: int = 0) -> None:
        super().__init__(strategy, "optimizer", OPTIMIZER_NAME, index)
        self.optimizer = optimizer
        self.model = model

    def state(self) -> dict[str, Any]:
        return optimizer_state(self.model, self.optimizer)

    def copied(self, state: dict[str, Any], copy: Callable[[Any], _Snapshot]) -> _Snapshot | Later:
        promise: _Snapshot | Later = copied_before_step(self.optimizer, state, self.name, copy)
        return promise

    def restore(self, payload: Any) -> None:
        load_optimizer_state(self.model, self.optimizer, payload)


def whole(state: Any, *, keep: bool) -> Any:
    """Return a nested state with every split tensor whole, one after another, on the ranks that keep it."""
    if isinstance(state, Mapping):
        return {name: whole(value, keep=keep) for name, value in state.items()}
    if isinstance(state, list):
        return [whole(value, keep=keep) for value in state]
    if not isinstance(state, torch.Tensor):
        return state
    full = getattr(state, "full_tensor", None)
    tensor = (full() if full is not None else state).detach()
    return tensor.cpu() if keep else torch.empty(0)


def _copy(state: Any) -> Any:
    """Return a nested state with copies of its tensors in host memory, split ones still split."""
    if isinstance(state, dict):
        return {name: _copy(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor) and hasattr(state, "full_tensor"):
        return state.detach().to("cpu", copy=True)
    return host_copy(state)


def _own_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group
