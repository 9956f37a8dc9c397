"""The gradients of an open accumulation window, which FSDP keeps out of the parameters until they are exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelerate.parallel.gradients import split_like, whole
from accelerate.parallel.unwrap import plain_name
from accelerate.runtime.torch_private import held_back_gradients
from accelerate.strategies.fsdp.optimizer_state import parameter_names


def read_open_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole gradients that this rank has summed up, by the names of parameters in the user's model.

    They are not those of other ranks: each rank has summed up its own share of the data. Ranks that share a layer bring
    its gradient together.
    """
    found: dict[str, torch.Tensor] = {}
    names = parameter_names(model)
    for unit, held in held_back_gradients(model):
        found.update({_name(unit, key, names): whole(gradient) for key, gradient in held.read().items()})
    return found


def write_open_gradients(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    """Go on in a window with what this rank summed up in it; an empty mapping ends it."""
    names = parameter_names(model)
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    for parameter in parameters.values():
        parameter.grad = None
    for unit, held in held_back_gradients(model):
        named = {key: gradients.get(_name(unit, key, names)) for key in held.parameters()}
        held.write(
            {
                # Before the exchange a gradient is split over the ranks of its layer alone.
                key: split_like(gradient, parameters.get(key), axes=("tp",))
                for key, gradient in named.items()
                if gradient is not None
            }
        )


def _name(unit: str, key: Any, names: Mapping[int, str]) -> str:
    """Return the name in the user's model of a parameter that is known by its identity, or by its name in a unit."""
    return names[key] if isinstance(key, int) else plain_name(f"{unit}.{key}" if unit else key)
