"""The steps of FSDP that programs call by themselves: sharding, and the files of sharded models and optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate._base.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._base.errors import AccelerateError, ConfigurationError
from accelerate._base.imports import require
from accelerate.checkpointing.parts import LoadOptions, read_torch
from accelerate.checkpointing.sharded import ShardFolder
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.offload.tensors import find_tied_parameters, retie_parameters
from accelerate.parallel.compile import checkpoint_blocks
from accelerate.parallel.unwrap import (
    extract_model_from_parallel,
    inner_block,
    is_peft_model,
    plain_name,
    plain_optimizer,
)
from accelerate.runtime.atomic import atomic_file
from accelerate.strategies.broadcast_weights import broadcast_state
from accelerate.strategies.fsdp.base import (
    FULL,
    LOCAL,
    SHARDED,
    block_names,
    matching_modules,
    state_dict_kind,
    unit_names,
)
from accelerate.strategies.sharded_state import (
    StateDict,
    contiguous_shards,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    write_shards,
)
from accelerate.strategies.tools import gather_full, local

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

FilePath = str | os.PathLike[str]


class UnknownParameterError(AccelerateError, KeyError):
    """Report a parameter of an optimizer that has no counterpart in the sharded model."""


# --- files -----------------------------------------------------------------------------------------------------------


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: FilePath,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a sharded model, as the plugin's `state_dict_type` says.

    Args:
        model_index: Which of several models this is.
        adapter_only: Of a PEFT model, write the adapter only.
        use_dcp: Write shards with torch.distributed.checkpoint, which can load them on any number of processes;
            otherwise in one file a rank.
    """
    kind = state_dict_kind(fsdp_plugin)
    state = _get_model_state_dict(model, adapter_only, _state_options(kind))
    files = _StateFiles(Path(output_dir), FSDP_MODEL_NAME, model_index, kind, use_dcp)
    files.write(state, "model")
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: FilePath,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read what `save_fsdp_model` wrote into a sharded model, and return the keys that did not match.

    A full state dict is read by the first rank and sent to the others.
    """
    accelerator.wait_for_everyone()
    kind = state_dict_kind(fsdp_plugin)
    files = _StateFiles(Path(input_dir), FSDP_MODEL_NAME, model_index, kind, use_dcp)
    saved = _LocalShards(_load(files.of_rank)) if files.is_by_rank else files.read()
    result = _set_model_state_dict(model, saved, adapter_only, _state_options(kind))
    accelerator.wait_for_everyone()
    return result


def _state_options(kind: str) -> StateDictOptions:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=kind == FULL, broadcast_from_rank0=kind == FULL, cpu_offload=kind == FULL)


def _get_model_state_dict(
    model: nn.Module, adapter_only: bool = False, sd_options: StateDictOptions | None = None
) -> StateDict:
    """Return the weights that `save_fsdp_model` writes; other libraries wrap this function.

    Args:
        adapter_only: Of a PEFT model, return the adapter only.
        sd_options: `full_state_dict=True` gives full weights on the first rank and nothing on the others.
    """
    state = model_state(model)
    if adapter_only and is_peft_model(model):
        state = _adapter_state_dict(model, state)
    if sd_options is not None and sd_options.full_state_dict:
        return gather_full(state, keep=_rank() == 0)
    return state


def _set_model_state_dict(
    model: nn.Module,
    state_dict: ShardFolder | StateDict,
    adapter_only: bool = False,
    sd_options: StateDictOptions | None = None,
) -> Any:
    """Restore what `load_fsdp_model` has read, and return the keys that did not match; other libraries wrap this function.

    Args:
        state_dict: Full weights that the first rank has, a folder of shards, or the shards of this rank.
        adapter_only: Of a PEFT model, restore the adapter only.
        sd_options: Accepted because callers pass it: the kind of `state_dict` decides how it is restored.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    names = _adapter_names(model) if adapter_only and is_peft_model(model) else None
    is_by_rank = isinstance(state_dict, _LocalShards)
    if isinstance(state_dict, ShardFolder) or not (
        is_by_rank or any(isinstance(value, DTensor) for value in state_dict.values())
    ):
        return load_model_state(model, state_dict, strict=names is None, names=names)
    present = model_state(model)
    own = names or {name: name for name in present}
    filled = state_dict
    if is_by_rank:
        filled = _fill_local({name: present[inner] for name, inner in own.items()}, state_dict)
    state = {own[name]: value for name, value in filled.items()}
    return set_model_state_dict(model, state, options=StateDictOptions(strict=names is None))


class _LocalShards(dict[str, Any]):
    """The shards of one rank as plain tensors, by name."""


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: FilePath,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of the optimizer of a sharded model, as the plugin's `state_dict_type` says."""
    files = _optimizer_files(fsdp_plugin, output_dir, optimizer_index, use_dcp)
    files.write(optimizer_state(model, optimizer), "optimizer")
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: FilePath,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote into the optimizer of a sharded model.

    Args:
        adapter_only: Accepted for symmetry with the model: an optimizer knows the trained parameters alone.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    accelerator.wait_for_everyone()
    files = _optimizer_files(fsdp_plugin, input_dir, optimizer_index, use_dcp)
    if files.is_by_rank:
        plain = plain_optimizer(optimizer)
        state = _fill_local(dict(get_optimizer_state_dict(model, plain)), _load(files.of_rank))
        set_optimizer_state_dict(model, plain, state)
    else:
        load_optimizer_state(model, optimizer, files.read())
    accelerator.wait_for_everyone()


class _StateFiles:
    """Where the state of one object lies, by the type of its state dict."""

    def __init__(self, folder: Path, name: str, index: int, kind: str, use_dcp: bool) -> None:
        self.folder = folder
        self.kind = kind
        self.is_by_rank = kind == LOCAL or (kind == SHARDED and not use_dcp)
        self.shards = folder / f"{name}_{index}"
        self.full = folder / (f"{name}_{index}.bin" if index else f"{name}.bin")
        # Of the files by rank, only those of a sharded dict have the index 0 in their names.
        suffix = f"_{index}" if index or kind == SHARDED else ""
        self.of_rank = folder / f"{name}{suffix}_rank{_rank()}.bin"

    def write(self, state: StateDict, key: str) -> None:
        """Write a state in shards; `key` is its name inside a folder of torch.distributed.checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.is_by_rank:
            _save(_local_shards(state), self.of_rank)
        elif self.kind == SHARDED:
            write_shards(contiguous_shards(state), key, self.shards)
        else:
            full = gather_full(state, keep=_rank() == 0)
            if _rank() == 0:
                _save(full, self.full)

    def read(self) -> ShardFolder | StateDict:
        """Return the folder of shards, or the full state on the first rank; nothing of it on the others."""
        if self.kind == SHARDED:
            # A folder that a user gives may be that of the state itself.
            return ShardFolder(self.shards if self.shards.is_dir() else self.folder)
        return _load(self.full) if _rank() == 0 else {}


def _save(state: StateDict, target: Path) -> None:
    # To an open file: torch would write the name of the partial one into it.
    with atomic_file(target) as partial, partial.open("wb") as file:
        torch.save(state, file)


def _optimizer_files(fsdp_plugin: Any, folder: FilePath, index: int, use_dcp: bool) -> _StateFiles:
    # A local state dict is a matter of the weights; the optimizer of such a model is kept in shards.
    kind = state_dict_kind(fsdp_plugin)
    return _StateFiles(Path(folder), OPTIMIZER_NAME, index, SHARDED if kind == LOCAL else kind, use_dcp)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _load(path: Path) -> StateDict:
    if not path.is_file():
        raise ConfigurationError(
            f"There is no file {str(path)!r}: the checkpoint was saved with another state dict type, or elsewhere. "
            "Set `state_dict_type` of the plugin to the one that it was saved with."
        )
    loaded: StateDict = read_torch(path, LoadOptions())
    return loaded


def _local_shards(state: Any) -> Any:
    """Return a nested state dict with this rank's plain tensors in place of sharded ones."""
    if isinstance(state, dict):
        return {key: _local_shards(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_local_shards(value) for value in state]
    if hasattr(state, "local_shards"):  # the sharded tensor of FSDP 1 without a mesh
        return [shard.tensor.cpu() for shard in state.local_shards()]
    return local(state).detach().cpu() if isinstance(state, torch.Tensor) else state


def _fill_local(state: Any, saved: Any, path: str = "") -> Any:
    """Return `state` with what `_local_shards` had of it: tensors are filled in place, other values are replaced.

    Raises:
        ConfigurationError: If the shapes differ, as after a run on another number of processes.
    """
    if isinstance(state, dict):
        return {
            key: _fill_local(state[key], saved[key], f"{path}.{key}") if key in saved else state[key] for key in state
        }
    is_dtensor = isinstance(state, DTensor)
    if not is_dtensor and not hasattr(state, "local_shards"):
        return saved
    targets = [state.to_local()] if is_dtensor else [shard.tensor for shard in state.local_shards()]
    for target, tensor in zip(targets, [saved] if is_dtensor else saved, strict=True):
        if target.shape != tensor.shape:
            raise ConfigurationError(
                f"The file of this rank holds {path.lstrip('.')!r} in shape {tuple(tensor.shape)!r}, and this run shards "
                f"it to {tuple(target.shape)!r}: files by rank fit only the number of processes that wrote them. "
                "Use that number, or save with use_dcp=True."
            )
        with torch.no_grad():
            target.copy_(tensor)
    return state


def _adapter_state_dict(model: nn.Module, state_dict: StateDict) -> StateDict:
    """Return the adapter's part of a state dict, under the names that PEFT gives it in a file."""
    peft = require("peft", why="to save adapters under the names that it reads")
    peft_model: Any = extract_model_from_parallel(model)
    found: StateDict = peft.get_peft_model_state_dict(
        peft_model, state_dict=state_dict, adapter_name=peft_model.active_adapter
    )
    return found


def _adapter_names(model: nn.Module) -> dict[str, str]:
    """Return the name in the model of every name in an adapter file.

    PEFT renames without a way back, so the entries are followed by their identity.
    """
    state = model_state(model)
    names = {id(value): name for name, value in state.items()}
    saved = _adapter_state_dict(model, state)
    return {name: names[id(value)] for name, value in saved.items() if id(value) in names}


# --- sharding --------------------------------------------------------------------------------------------------------


def fsdp2_prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
    """Shard a model as the plugin of the run says; it stays the same object."""
    sharded: nn.Module = accelerator.strategy.wrap(model)
    return sharded


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return a function that tells whether a module of the model is sharded on its own; None without a policy."""
    if fsdp2_plugin.auto_wrap_policy is None:
        return None
    chosen = {id(inner_block(model.get_submodule(name))) for name in unit_names(fsdp2_plugin, model)}
    return lambda module: id(inner_block(module)) in chosen


def fsdp2_apply_ac(accelerator: Any, model: nn.Module) -> nn.Module:
    """Let the blocks that the plugin selects compute their activations again in the backward pass."""
    plugin: FullyShardedDataParallelPlugin = accelerator.state.fsdp_plugin
    return checkpoint_blocks(
        model, block_names(plugin, model), offload=bool(getattr(plugin, "activation_checkpointing_offload", False))
    )


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by the names that they have without wrappers of checkpointing and compilation."""
    return {plain_name(name): value for name, value in named_params.items()}


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Any], cpu_offload: bool = False
) -> nn.Module:
    """Fill a sharded model from full weights that the first rank has, one after another.

    Args:
        accelerator: The accelerator of the run.
        model: The sharded model; its weights may have no memory yet.
        full_sd: The full weights; other ranks may pass anything.
        cpu_offload: Keep the shards in host memory.
    """
    state: StateDict = {
        name: torch.empty_like(value, device=accelerator.device) if value.is_meta else value
        for name, value in model.state_dict().items()
    }
    broadcast_state(state, full_sd if accelerator.is_main_process else {})
    if cpu_offload:
        state = {name: value.to("cpu") for name, value in state.items()}
    tied = find_tied_parameters(model)
    model.load_state_dict(state, assign=True)
    retie_parameters(model, tied)
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


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """Return a function that gives memory to a module and keeps parameters one that are one in the model.

    Args:
        param_init_fn: Gives memory to the parameters of one module.
        model: The model that they are in, before any got memory.
        device: Where they get memory.
    """
    # The old parameters are kept alive, so that nothing else gets their identity.
    shared = [model.get_parameter(names[0]) for names in find_tied_parameters(model)]
    tied = {id(parameter): parameter for parameter in shared}
    if not tied:
        return param_init_fn
    initialised: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> None:
        own = {name: id(parameter) for name, parameter in module.named_parameters(recurse=False)}
        param_init_fn(module)
        for name, key in own.items():
            if key in tied:
                first = initialised.setdefault(key, nn.Parameter(module.get_parameter(name).to(device)))
                setattr(module, name, first)

    return initialise


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of modules, given as they are or by a pattern for their whole name, on a device."""
    return {parameter for module in matching_modules(modules, model) for parameter in module.to(device).parameters()}


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for version 2; options are those of `torch.amp.GradScaler`."""
    return torch.amp.GradScaler(**kwargs)
