"""The part of a sharded state dict that lies on this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from accelerate._base.errors import ConfigurationError


def local_shards(state: Any) -> Any:
    """Return a nested state dict with this rank's plain tensors in place of sharded ones."""
    if isinstance(state, dict):
        return {key: local_shards(value) for key, value in state.items()}
    if isinstance(state, list):
        return [local_shards(value) for value in state]
    return _local(state)


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local()
    if hasattr(value, "local_shards"):  # the sharded tensor of FSDP1, whose class torch keeps private
        return [shard.tensor for shard in value.local_shards()]
    return value


def write_into(state: Any, saved: Any, path: str = "") -> Any:
    """Return `state` with what `local_shards` had of it: tensors are filled in place, other values are replaced.

    Raises:
        ConfigurationError: If the shapes differ, as after a run on another number of processes.
    """
    if isinstance(state, dict):
        return {
            key: write_into(state[key], saved[key], f"{path}.{key}") if key in saved else state[key] for key in state
        }
    if hasattr(state, "local_shards"):
        for shard, tensor in zip(state.local_shards(), saved, strict=True):
            _fill(shard.tensor, tensor, path)
        return state
    if isinstance(state, DTensor):
        _fill(state.to_local(), saved, path)
        return state
    return saved


def _fill(target: torch.Tensor, saved: torch.Tensor, path: str) -> None:
    if target.shape != saved.shape:
        raise ConfigurationError(
            f"The file of this rank holds {path.lstrip('.')!r} in shape {tuple(saved.shape)!r}, and this run shards it "
            f"to {tuple(target.shape)!r}: files by rank fit only the number of processes that wrote them. "
            "Use that number, or save with use_dcp=True."
        )
    with torch.no_grad():
        target.copy_(saved)
