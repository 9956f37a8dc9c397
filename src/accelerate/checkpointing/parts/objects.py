"""The parts that are one object with `state_dict` and `load_state_dict` and one file."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import names, sharded
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.parts.base import LoadOptions, read_torch
from accelerate.checkpointing.parts.host_copy import host_copy
from accelerate.checkpointing.parts.later import copied_before_step

_LOG = logging.getLogger(__name__)


class Stateful(Protocol):
    """What can be saved."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state."""


class ObjectPart:
    """An object whose state is one torch file, the same on all ranks."""

    everywhere = False

    def __init__(self, name: str, file: str, held: Stateful) -> None:
        self.name = name
        self.file = file
        self.held = held

    def snapshot(self, *, copy: bool) -> Any:
        state = self.held.state_dict()
        return host_copy(state) if copy else state

    def write(self, payload: Any, folder: StagedFolder) -> None:
        folder.write_torch(self.file, payload)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        return read_torch(folder / self.file, options)

    def restore(self, payload: Any) -> None:
        self.held.load_state_dict(payload)


class OptimizerPart(ObjectPart):
    """An optimizer."""

    def __init__(self, optimizer: Any, index: int = 0) -> None:
        super().__init__(f"optimizer {index}", names.optimizer_file(index), optimizer)
        self.optimizer = optimizer
        self.index = index

    def snapshot(self, *, copy: bool) -> Any:
        state = self.held.state_dict()
        return copied_before_step(self.optimizer, state, self.name) if copy else state

    def read(self, folder: Path, options: LoadOptions) -> Any:
        shards = folder / names.sharded_optimizer(self.index)
        is_sharded = sharded.is_sharded(shards)
        # A run that shards saves by the names of parameters.
        state = sharded.by_position(
            sharded.read_whole(shards)["optimizer"] if is_sharded else super().read(folder, options)
        )
        own_groups: list[dict[str, Any]] = self.optimizer.param_groups
        saved, own = ([len(group["params"]) for group in groups] for groups in (state["param_groups"], own_groups))
        if saved != own:
            raise CheckpointError(
                f"{str(folder / self.file)!r} is of an optimizer with {saved} parameters in its groups, and the one here "
                f"has {own}: it is of another model, or the groups were made otherwise. Build the optimizer as it was "
                "when the checkpoint was saved."
            )
        return state


class SchedulerPart(ObjectPart):
    """A learning-rate scheduler."""

    def __init__(self, scheduler: Any, index: int = 0) -> None:
        super().__init__(f"scheduler {index}", names.scheduler_file(index), scheduler)


class ScalerPart(ObjectPart):
    """The gradient scaler of float16 training."""

    def __init__(self, scaler: Any) -> None:
        super().__init__("gradient scaler", names.SCALER, scaler)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        if not (folder / self.file).is_file():
            _LOG.warning(
                "The checkpoint %s is of a run without a gradient scaler: it starts with its own scale.", folder
            )
            return None
        return super().read(folder, options)

    def restore(self, payload: Any) -> None:
        if payload is not None:
            super().restore(payload)


class CustomPart(ObjectPart):
    """An object that the program registered; its state may hold anything, so its file is read as trusted."""

    def __init__(self, held: Stateful, index: int = 0) -> None:
        super().__init__(f"{type(held).__name__} (registered object {index})", names.custom_file(index), held)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        return read_torch(folder / self.file, options, map_location="cpu", weights_only=False)


def check_custom_count(folder: Path, objects: Sequence[Any]) -> None:
    """Refuse a checkpoint with another number of registered objects.

    Raises:
        CheckpointError: (a RuntimeError) if the numbers differ.
    """
    found = len(list(folder.glob(names.custom_file(0).replace("0", "[0-9]*"))))
    if found != len(objects):
        raise CheckpointError(
            f"{str(folder)!r} holds {found} registered object(s), and this run has {len(objects)}: it is not known which "
            "belongs to which. Call register_for_checkpointing with the same objects as when it was saved."
        )


class ProgressPart:
    """The counters of a run."""

    name = "progress"
    everywhere = False

    def __init__(self, progress: Stateful) -> None:
        self.progress = progress

    def snapshot(self, *, copy: bool) -> Any:
        return self.progress.state_dict()

    def write(self, payload: Any, folder: StagedFolder) -> None:
        folder.write_json(names.PROGRESS, payload)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        path = folder / names.PROGRESS
        if not path.is_file():
            return None  # a checkpoint of another library
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"{str(path)!r} is not JSON ({error}): it is broken. Use another checkpoint."
            ) from error

    def restore(self, payload: Any) -> None:
        if payload is not None:
            self.progress.load_state_dict(payload)
