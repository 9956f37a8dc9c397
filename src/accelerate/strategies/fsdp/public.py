"""Single steps of sharding that programs call by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from accelerate._base.errors import AccelerateError
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.parallel.activation_checkpoint import checkpoint_blocks
from accelerate.parallel.unwrap import plain_name
from accelerate.strategies.fsdp.filling import fill_from_first
from accelerate.strategies.fsdp.wrapping import block_names, prepare_policy


class UnknownParameterError(AccelerateError, KeyError):
    """Report a parameter of an optimizer that has no counterpart in the sharded model."""


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """Return a function that gives memory to a module and keeps parameters one that are one in the model.

    Args:
        param_init_fn: Gives memory to the parameters of one module.
        model: The model that they are in, before any got memory.
        device: Where they get memory.
    """
    counts: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    shared = {id(parameter): parameter for parameter in model.parameters() if counts[id(parameter)] > 1}
    if not shared:
        return param_init_fn
    settled: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> None:
        own = {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}
        param_init_fn(module)
        for name, key in own.items():
            if key in shared:
                tied = settled.setdefault(key, nn.Parameter(module.get_parameter(name).to(device)))
                setattr(module, name, tied)

    return initialise


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Let the blocks that the plugin selects compute their activations again in the backward pass."""
    plugin: FullyShardedDataParallelPlugin = accelerator.state.fsdp_plugin
    return checkpoint_blocks(
        model, block_names(plugin, model), offload=bool(getattr(plugin, "activation_checkpointing_offload", False))
    )


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by the names that they have without wrappers of checkpointing and compilation."""
    return {plain_name(name): value for name, value in named_params.items()}


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return a function that tells whether a module of the model is sharded on its own; None without a policy."""
    return prepare_policy(fsdp2_plugin, model) if fsdp2_plugin.auto_wrap_policy is not None else None


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model as the plugin of the run says; it stays the same object."""
    sharded: nn.Module = accelerator.strategy.wrap(model)
    return sharded


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Fill a sharded model from whole weights that the first rank has, one after another.

    Args:
        accelerator: The accelerator of the run.
        model: The sharded model; its weights may have no memory yet.
        full_sd: The whole weights; other ranks may pass anything.
        cpu_offload: Keep the shards in host memory.
    """
    state: dict[str, Any] = {
        name: torch.empty_like(value, device=accelerator.device) if value.is_meta else value
        for name, value in model.state_dict().items()
    }
    fill_from_first(state, full_sd if accelerator.is_main_process else {})
    if cpu_offload:
        state = {name: value.to("cpu") for name, value in state.items()}
    model.load_state_dict(state, assign=True)
    return model


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[int, nn.Parameter]) -> None:
    """Point an optimizer to sharded parameters.

    Args:
        mapping: Address of an old parameter's data -> the parameter in its place.

    Raises:
        UnknownParameterError: (a KeyError) if a parameter is not in the mapping.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.data_ptr() not in mapping:
                raise UnknownParameterError(
                    f"A parameter of shape {tuple(parameter.shape)} of {type(optimizer).__name__} is not in the sharded "
                    "model, so it would not be trained. Build the optimizer from the parameters of the same model, before "
                    "that is sharded."
                )
        group["params"] = [mapping[parameter.data_ptr()] for parameter in group["params"]]


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for version 2; options are those of `torch.amp.GradScaler`."""
    return torch.amp.GradScaler(**kwargs)
