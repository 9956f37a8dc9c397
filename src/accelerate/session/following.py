"""Point optimizers to the parameters that stand in for those they were built with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError

Moved = Mapping[torch.nn.Parameter, torch.nn.Parameter | None]
"""Old parameter -> the one in its place; None for one that is trained on another rank."""


def follow(optimizers: Iterable[torch.optim.Optimizer], moved: Moved) -> None:
    """Replace parameters in the groups and states of optimizers; several may have been joined into one.

    Raises:
        ConfigurationError: If parameters of two groups were joined into one, or joined ones have a state.
    """
    joined = _joined(moved)
    for optimizer in optimizers:
        groups = [
            list(dict.fromkeys(new for new in (moved.get(old, old) for old in group["params"]) if new is not None))
            for group in optimizer.param_groups
        ]
        _refuse_shared(optimizer, groups)
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters
        for old in [parameter for parameter in moved if parameter in optimizer.state]:
            state, new = optimizer.state.pop(old), moved[old]
            if new is not None:
                _refuse_state(optimizer, new, joined)
                optimizer.state[new] = {name: _spread(value, old, new) for name, value in state.items()}


def _joined(moved: Moved) -> set[int]:
    counts: dict[int, int] = {}
    for new in moved.values():
        counts[id(new)] = counts.get(id(new), 0) + 1
    return {key for key, count in counts.items() if count > 1}


def _refuse_shared(optimizer: torch.optim.Optimizer, groups: list[list[torch.nn.Parameter]]) -> None:
    every = [id(parameter) for parameters in groups for parameter in parameters]
    if len(every) != len(set(every)):
        raise ConfigurationError(
            f"This {type(optimizer).__name__} has {len(groups)} groups of parameters, but the engine joins parameters of "
            "several of them into one, which can have one learning rate only. Set use_orig_params=True of the FSDP "
            "plugin, or fsdp_version=2."
        )


def _refuse_state(optimizer: torch.optim.Optimizer, new: torch.nn.Parameter, joined: set[int]) -> None:
    if id(new) in joined:
        raise ConfigurationError(
            f"This {type(optimizer).__name__} has already a state for parameters that the engine joins into one, which "
            "cannot take it over. Prepare it before its first step, and restore its state with load_state()."
        )


def _spread(value: Any, old: torch.Tensor, new: Any) -> Any:
    """Return a state that goes with a parameter as that is spread over ranks."""
    is_split = hasattr(new, "placements") and not hasattr(value, "placements")
    if not (is_split and isinstance(value, torch.Tensor) and value.shape == old.shape):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)
