"""The position of a loader."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate.checkpointing import names
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.parts.base import LoadOptions, read_torch
from accelerate.checkpointing.parts.host_copy import host_copy

_LOG = logging.getLogger(__name__)
_OWN = "_accelerate"


class LoaderPart:
    """A prepared loader.

    A position is counted in global samples, so one file serves all ranks. Where the state of a loader is another on each
    rank, each writes its own: torchdata's loaders, and data that was divided before it came here.

    In a run that trains, a loader that no optimizer steps with is for evaluation: it starts anew, because a metric over
    the rest of its samples would be a wrong number.

    Args:
        others: All loaders of the run.
    """

    def __init__(
        self, loader: Any, index: int = 0, *, rank: int = 0, restores: bool = True, others: Sequence[Any] = ()
    ) -> None:
        self.name = f"loader {index}"
        self.loader = loader
        self.index = index
        self.rank = rank
        self.restores = restores
        self.others = others

    @property
    def _is_stateful(self) -> bool:
        return hasattr(getattr(self.loader, "base_dataloader", None), "load_state_dict")

    @property
    def everywhere(self) -> bool:
        return self._is_stateful or bool(getattr(self.loader, "split_elsewhere", 0))

    def snapshot(self, *, copy: bool) -> Any:
        if not hasattr(self.loader, "state_dict"):
            return None
        state = self.loader.beginning_state_dict() if self._evaluates else self.loader.state_dict()
        return host_copy(state) if copy else state

    @property
    def _evaluates(self) -> bool:
        if not hasattr(self.loader, "beginning_state_dict"):
            return False
        return not self.loader.trains and any(getattr(loader, "trains", False) for loader in self.others)

    def write(self, payload: Any, folder: StagedFolder) -> None:
        if payload is not None:
            rank = self.rank if self.everywhere else 0
            folder.write_torch(names.loader_file(self.index, rank, stateful=self._is_stateful), payload)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        if not self.restores or not hasattr(self.loader, "load_state_dict"):
            return None
        own_rank = self.rank if options.saved_world_size == options.world_size else 0
        kind = self._is_stateful
        # A position means the same to both kinds of loader; the kind that saved it may have been the other one.
        candidates = [
            names.loader_file(self.index, rank, stateful=stateful)
            for stateful in (kind, not kind)
            for rank in (own_rank, 0)
        ]
        file = next((folder / name for name in candidates if (folder / name).is_file()), None)
        state = read_torch(file, options) if file is not None else None
        if state is not None and not kind and "epoch" not in state.get(_OWN, state):
            _LOG.warning("%s was written by torchdata's loader alone: it says nothing to %s.", file, self.name)
            return None
        return state

    def restore(self, payload: Any) -> None:
        if payload is not None:
            self.loader.load_state_dict(payload)
