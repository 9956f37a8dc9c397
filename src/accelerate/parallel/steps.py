"""The steps of model parallelism that a strategy puts before it wraps or shards a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accelerate.parallel.gradients import share_from_first
from accelerate.parallel.mesh import averaging_group, axis_group, has_axis
from accelerate.parallel.tensor import split_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Step = Callable[[torch.nn.Module], torch.nn.Module]


def tensor_parallel_step(mesh: DeviceMesh | None, plan: Mapping[str, Any] | None = None) -> Step | None:
    """Return the step that splits layers over the axis "tp"; None where that axis is not in use.

    It stands before activation checkpointing, compilation and sharding: each of those acts on what it makes.
    """
    if mesh is None or not has_axis(mesh, "tp"):
        return None
    axis = mesh["tp"]

    def split_over_ranks(model: torch.nn.Module) -> torch.nn.Module:
        return split_layers(model, axis, plan)

    return split_over_ranks


def same_start_step(mesh: DeviceMesh | None) -> Step | None:
    """Return the step that gives all ranks of a model equal weights; None where each holds its own.

    What is split was cut out of the first rank's weights; what is whole must be equal too, or ranks of one model would
    compute with different layers.
    """
    tensor, replicas = axis_group(mesh, "tp"), averaging_group(mesh)
    if tensor is None and replicas is None:
        return None

    def take_weights_of_first(model: torch.nn.Module) -> torch.nn.Module:
        if tensor is not None:
            share_from_first(model, tensor, split=False)
        if replicas is not None:
            share_from_first(model, replicas, split=True)
        return model

    return take_weights_of_first
