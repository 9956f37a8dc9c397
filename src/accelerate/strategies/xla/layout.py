"""How batches, weights and activations are spread over a mesh of XLA devices: partition specs, one entry for each dimension."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError

Spec = tuple[Any, ...]
"""For each dimension of a tensor the axis that splits it, several axes, or None."""

REPLICATE, SHARD, TENSOR = MeshAxis.DP_REPLICATE.value, MeshAxis.DP_SHARD.value, MeshAxis.TP.value
AXES = (REPLICATE, SHARD, TENSOR)
_BATCH = (REPLICATE, SHARD)
# The dimension of a weight that a style of tensor parallelism splits; of a bias, that of the outputs.
_OUTPUTS, _INPUTS = 0, 1
_STYLES = {
    "colwise": _OUTPUTS,
    "colwise_rep": _OUTPUTS,
    "colwise_gather_output": _OUTPUTS,
    "rowwise": _INPUTS,
    "rowwise_rep": _INPUTS,
    "rowwise_split_input": _INPUTS,
    "embedding_rowwise": _OUTPUTS,
    "embedding_colwise": _INPUTS,
}
_WHOLE = frozenset({"replicate", "replicated", "sequence_parallel"})


def batch_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Return which of the axes of a mesh spread the samples of a batch."""
    return tuple(axis for axis in axes if axis in _BATCH)


def batch_spec(axes: Iterable[str], num_dims: int) -> Spec:
    """Return how a tensor of a batch is spread over a mesh with these axes: by its rows."""
    return (batch_axes(axes) or None, *[None] * (num_dims - 1)) if num_dims else ()


def weight_spec(shape: tuple[int, ...], num_shards: int, split: int | None = None) -> Spec:
    """Return how a weight is spread.

    It is sharded along the first dimension that its shards divide evenly, else along the longest. One that has fewer rows
    than there are shards stays whole.

    Args:
        num_shards: The devices over which weights are sharded.
        split: The dimension that tensor parallelism splits.
    """
    spec: list[str | None] = [None] * len(shape)
    if split is not None and split < len(shape):
        spec[split] = TENSOR
    free = [dim for dim, size in enumerate(shape) if spec[dim] is None and size >= num_shards > 1]
    if free:
        even = [dim for dim in free if shape[dim] % num_shards == 0]
        spec[even[0] if even else max(free, key=lambda dim: shape[dim])] = SHARD
    return tuple(spec)


def split_dimensions(model: torch.nn.Module, plan: Mapping[str, Any]) -> dict[str, int]:
    """Return which dimension of each parameter tensor parallelism splits, by the parameter's name.

    Args:
        plan: Dotted name of a module, with `*` for any part -> name of a style.

    Raises:
        ConfigurationError: If the plan has a style that is not known, or names no module of the model.
    """
    modules = dict(model.named_modules())
    found: dict[str, int] = {}
    for pattern, style in plan.items():
        if isinstance(style, str) and style in _WHOLE:
            continue
        if not isinstance(style, str) or style not in _STYLES:
            raise ConfigurationError(
                f"The plan of {type(model).__name__} splits {pattern!r} in the style {style!r}, which is not known for XLA "
                f"devices. Write one of {', '.join(_STYLES)}."
            )
        matching = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigurationError(
                f"The plan of {type(model).__name__} names {pattern!r}, but the model has no such module. Its modules are "
                f"{', '.join(list(modules)[1:9])}, ..."
            )
        for name in matching:
            for leaf, parameter in modules[name].named_parameters(recurse=False):
                # A bias is added to the outputs: whole where each device has only a part of their sum.
                if parameter.dim() > 1 or _STYLES[style] == _OUTPUTS:
                    found[f"{name}.{leaf}" if name else leaf] = _STYLES[style]
    return found


@dataclass(frozen=True)
class BatchSharding:
    """Tells torch_xla how a batch is spread when it is sent to the devices; tensors may have any number of dimensions.

    Args:
        mesh: The mesh of torch_xla.
        minibatch: The rows are those of this machine, a part of the whole batch.
    """

    mesh: Any
    minibatch: bool = False

    def xla_spec(self, tensor: torch.Tensor) -> Any:
        """Return torch_xla's description for one tensor, None for one without rows."""
        if tensor.dim() == 0:
            return None
        from torch_xla.distributed.spmd import ShardingSpec

        spec = batch_spec(self.mesh.axis_names, tensor.dim())
        return ShardingSpec(self.mesh, spec, minibatch=self.minibatch).xla_spec(tensor)


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a layer returns."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for entry in output:
            yield from tensors_of(entry)
