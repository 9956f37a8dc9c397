"""What a part of a run's state is."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import torch_file
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.manifest import Manifest


@dataclass(frozen=True)
class Prepared:
    """The prepared objects of a run, whose state a strategy divides into parts.

    Args:
        safe_serialization: Write weights as safetensors.
        restore_positions: Bring loaders back to where they stood.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    safe_serialization: bool = True
    restore_positions: bool = True


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is read.

    Args:
        rank: The rank that reads.
        world_size: The ranks that read.
        manifest: The manifest of the checkpoint, None if another library wrote it.
        map_location: Where tensors are put while they are read.
        load_kwargs: Arguments of `torch.load`.
        model_kwargs: Arguments of `load_state_dict` of models.
    """

    rank: int = 0
    world_size: int = 1
    manifest: Manifest | None = None
    map_location: torch.device | str = "cpu"
    load_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def saved_world_size(self) -> int:
        """The number of ranks that wrote the checkpoint; that of this run where it is not known."""
        return self.manifest.world_size if self.manifest is not None else self.world_size


class Part(Protocol):
    """One thing that is saved and restored.

    A save takes a snapshot and then writes it, perhaps in another thread while training goes on. A load reads all parts
    before it restores the first, so that a checkpoint that cannot be read changes nothing.
    """

    @property
    def name(self) -> str:
        """What this is, for messages."""

    @property
    def everywhere(self) -> bool:
        """Whether every rank saves; otherwise the leading one saves for all."""

    def snapshot(self, *, copy: bool) -> Any:
        """Return the state, with `copy` in host memory that training does not change. All ranks may take part.

        It may be a `Later`, which is copied at the beginning of the work in the background.
        """

    def write(self, payload: Any, folder: StagedFolder) -> None:
        """Write a snapshot, without talking to other ranks."""

    def read(self, folder: Path, options: LoadOptions) -> Any:
        """Return the state in a checkpoint, without changing anything; raise if it does not fit."""

    def restore(self, payload: Any) -> None:
        """Take over what was read."""


def read_torch(path: Path, options: LoadOptions, **overrides: Any) -> Any:
    """Read a torch file of a checkpoint.

    Raises:
        CheckpointError: If it is not there or cannot be read.
    """
    keywords: dict[str, Any] = {"map_location": options.map_location, **options.load_kwargs, **overrides}
    try:
        return torch_file.read(path, **keywords)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{str(path)!r} is missing: the checkpoint is not whole, or was saved by a run with fewer objects. Prepare "
            "and register the same objects as when it was saved, or use another checkpoint."
        ) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: it is broken, or it holds objects that are not loaded for safety "
            f"({str(error).splitlines()[0]}). If you trust it, write "
            "load_state(..., load_kwargs={'weights_only': False})."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({type(error).__name__}: {str(error).splitlines()[0]}), so it is probably "
            "broken. Use another checkpoint."
        ) from error
