"""Styles of tensor-parallel plans: those of torch by the names of Transformers, and those that torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from accelerate._base.errors import ConfigurationError
from accelerate.runtime.torch_private import interleaved_shard

_HELD = "_split_parameters"
PACKED = 2
"""Number of projections in a packed weight: gate and up."""


def partial_gradient(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a tensor that all ranks have, and sum its gradient over them: each computes a part of it."""
    return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


class LocalParameters(ParallelStyle):
    """Let a module compute with shards of its parameters, as plain tensors.

    Args:
        gradients: Placement of the gradients that the module computes; that of the parameter if None.
    """

    def __init__(self, gradients: Placement | None = None) -> None:
        self.gradients = None if gradients is None else [gradients]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self.enter, device_mesh), with_kwargs=True)
        module.register_forward_hook(partial(self.leave, device_mesh), always_call=True)
        return module

    def enter(self, mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace split parameters by the shards of this rank."""
        split: dict[str, Any] = {
            name: value for name, value in module._parameters.items() if isinstance(value, DTensor)
        }
        module.__dict__[_HELD] = split
        for name, value in split.items():
            module._parameters[name] = value.to_local(grad_placements=self.gradients)
        return args, kwargs

    def leave(self, mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the split parameters back."""
        module._parameters.update(module.__dict__.pop(_HELD, {}))
        return output


class PartialGradients(LocalParameters):
    """Replicate a module that computes with the heads of one rank: its gradients are summed over the ranks.

    The gradient stays a partial sum until it is needed, so that a window of several batches has one exchange.
    """

    def __init__(self) -> None:
        super().__init__(Partial())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in list(module._parameters):
            split_parameter(module, name, Replicate(), device_mesh)
        return super()._apply(module, device_mesh)


class SplitExperts(LocalParameters):
    """Compute with a part of every expert on each rank, and sum the outputs."""

    def enter(self, mesh: DeviceMesh, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the weights, and sum the gradients of hidden states and routing weights."""

        def shared(value: Any) -> Any:
            floats = isinstance(value, torch.Tensor) and value.is_floating_point()
            return partial_gradient(value, mesh) if floats else value

        args, kwargs = super().enter(mesh, module, args, kwargs)
        return tuple(shared(value) for value in args), {name: shared(value) for name, value in kwargs.items()}

    def leave(self, mesh: DeviceMesh, module: nn.Module, args: Any, output: Any) -> Any:
        """Put the weights back and sum the outputs."""
        super().leave(mesh, module, args, output)
        if not isinstance(output, torch.Tensor):  # the forward pass raised
            return output
        return (
            DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()
        )


class IdentityExpert(ParallelStyle):
    """Divide the input of an expert that returns it: the outputs of all ranks are summed."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(partial(self.divide, device_mesh.size()))
        return module

    @staticmethod
    def divide(size: int, module: nn.Module, args: Any) -> Any:
        """Divide the hidden states by the number of ranks."""
        return args[0] / size, *args[1:]


class RotaryKey(ParallelStyle):
    """Sum the gradient of the rotary part of a key, which each rank uses with its own heads.

    Args:
        width: Number of the last columns of the output that skip the layers in which gradients are summed.
    """

    def __init__(self, width: int) -> None:
        self.width = width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(partial(self.share, device_mesh))
        return module

    def share(self, mesh: DeviceMesh, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Sum the gradient of the last columns."""
        compressed, rotary = output.split([output.shape[-1] - self.width, self.width], dim=-1)
        return torch.cat([compressed, partial_gradient(rotary, mesh)], dim=-1)


def _rotary_key(model: nn.Module) -> ParallelStyle:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(config, "qk_rope_head_dim", None)
    if not isinstance(width, int):
        raise ConfigurationError(
            f"The style 'mla_kv_a_proj' needs config.qk_rope_head_dim, but {type(model).__name__} has {width!r}. "
            "Set it in the model's config."
        )
    return RotaryKey(width)


def _gathered(model: nn.Module) -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


def _from_whole(model: nn.Module) -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


MODULE_STYLES: Mapping[str, Callable[[nn.Module], ParallelStyle]] = {
    "colwise": lambda model: ColwiseParallel(),
    "colwise_rep": _gathered,
    "colwise_gather_output": _gathered,
    "rowwise": lambda model: RowwiseParallel(),
    "rowwise_rep": _from_whole,
    "rowwise_split_input": _from_whole,
    "embedding_rowwise": _from_whole,
    "embedding_colwise": _gathered,
    "sequence_parallel": lambda model: SequenceParallel(),
    "replicated_with_grad_allreduce": lambda model: PartialGradients(),
    "local_params": lambda model: LocalParameters(),
    "moe_tp_experts": lambda model: SplitExperts(),
    "moe_identity_expert": lambda model: IdentityExpert(),
    "mla_kv_a_proj": _rotary_key,
}
"""Name of a style -> the style of a module, for the model that it is in."""


def _shard_rows(dimensions: int) -> Placement:
    return Shard(max(dimensions - 2, 0))


def _shard_columns(dimensions: int) -> Placement:
    return Shard(dimensions - 1)


PARAMETER_STYLES: Mapping[str, Callable[[int], Placement]] = {
    "colwise": _shard_rows,
    "rowwise": _shard_columns,
    "packed_colwise": lambda dimensions: interleaved_shard(max(dimensions - 2, 0), PACKED),
    "packed_rowwise": lambda dimensions: interleaved_shard(dimensions - 1, PACKED),
}
"""Name of a style -> the placement of a parameter with a number of dimensions, for plans that name parameters."""


def check_parameter(model: nn.Module, name: str, style: str, size: int) -> None:
    """Refuse a parameter that cannot be split evenly.

    Raises:
        ConfigurationError: If a dimension is not divisible.
    """
    shape = tuple(model.get_parameter(name).shape)
    placement: Any = PARAMETER_STYLES[style](len(shape))
    parts = size * PACKED if style.startswith("packed") else size
    if shape[placement.dim] % parts:
        raise ConfigurationError(
            f"{name!r} of {type(model).__name__} has the shape {shape}, and the style {style!r} splits dimension "
            f"{placement.dim} into {parts} equal parts. Choose a tp_size that divides it."
        )


def split_parameter(module: nn.Module, name: str, placement: Placement, mesh: DeviceMesh) -> None:
    """Replace a parameter of a module by its shard, cut out of the first rank's."""
    parameter = module._parameters[name]
    if parameter is not None:
        shard = distribute_tensor(parameter.detach(), mesh, [placement])
        module._parameters[name] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
