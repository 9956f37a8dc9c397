"""The state of an optimizer whose parameters are sharded, by the names of the parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import sharded
from accelerate.collectives import communicator
from accelerate.parallel.unwrap import CHECKPOINT_WRAPPER, extract_model_from_parallel, plain_name, plain_optimizer
from accelerate.runtime.torch_private import flat_parameter_names
from accelerate.strategies.fsdp.filling import fill_from_first
from accelerate.strategies.fsdp.originals import ORIGINALS, Originals


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether a model is wrapped by version 1 of FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel)


def optimizer_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the state in shards, with the names of parameters in place of their numbers.

    torch's own helper takes a step first with an optimizer that has none yet, which counts as one afterwards.
    """
    plain = plain_optimizer(optimizer)
    if is_fsdp1(model):
        return _fsdp1_state(model, plain)
    names = parameter_names(model)
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in plain.param_groups
    ]
    state = {names[id(parameter)]: dict(entry) for parameter, entry in plain.state.items() if id(parameter) in names}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    model: nn.Module, optimizer: Any, saved: Path | dict[str, Any], *, is_stage: bool = False
) -> None:
    """Restore a state from a folder of shards, or from a whole state that the first rank has; every rank calls it.

    Args:
        is_stage: Other ranks hold other parameters, so that more of them were saved than are here.

    Raises:
        CheckpointError: If it is of another optimizer.
    """
    plain = plain_optimizer(optimizer)
    if is_fsdp1(model):
        _load_fsdp1(model, plain, saved)
        return
    if isinstance(saved, Path):
        _load_shards(model, plain, saved, is_stage=is_stage)
        return
    _load_whole(plain, saved)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name in the user's model of every parameter, by identity."""
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    return {id(parameter): plain_name(name) for name, parameter in inner.named_parameters()}


def _load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, *, is_stage: bool) -> None:
    """Make room for what was saved, in the layout of this run, and fill it."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    names = parameter_names(model)
    metadata = sharded.read_metadata(folder)
    paths = metadata.planner_data or {}
    by_name = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"] if id(p) in names}
    others = [key for key in metadata.state_dict_metadata if paths[key][1] == "param_groups"]
    groups = _nested(sharded.read_entries(folder, metadata, others), paths)["param_groups"]
    if is_stage:
        groups = [{**group, "params": [name for name in group["params"] if name in by_name]} for group in groups]
    state: dict[str, dict[str, Any]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        path = paths[key]
        if path[1] != "state" or path[2] not in by_name:
            continue
        shape = None
        if isinstance(entry, TensorStorageMetadata):
            shape = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        state.setdefault(path[2], {})[path[3]] = _room(shape, by_name[path[2]])
    held = {"optimizer": {"state": state}}
    if state:
        sharded.load_into(held, folder)
    _install(optimizer, sharded.by_position({"state": held["optimizer"]["state"], "param_groups": groups}), folder)


def _nested(flat: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    return sharded.nested({key: paths[key][1:] for key in flat}, flat)


def _load_whole(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Make room for what the first rank has, in the layout of this run, and fill it from there."""
    ranks = communicator()
    counted = sharded.by_position(saved) if ranks.rank == 0 else {}
    plan: list[Any] = [_plan_of(counted) if ranks.rank == 0 else None]
    ranks.broadcast_objects(plan)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _check_groups(optimizer.param_groups, plan[0]["param_groups"], "optimizer.bin")
    state = {
        index: {name: _room(value, parameters[index]) for name, value in entry.items()}
        for index, entry in plan[0]["state"].items()
    }
    fill_from_first(state, counted.get("state", {}))
    optimizer.load_state_dict({"state": state, "param_groups": plan[0]["param_groups"]})


def _plan_of(counted: dict[str, Any]) -> dict[str, Any]:
    """Return a state with tensors without memory in place of its tensors."""
    state = {
        index: {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        for index, entry in counted["state"].items()
    }
    return {"state": state, "param_groups": counted["param_groups"]}


def _room(shape: Any, parameter: torch.Tensor) -> Any:
    """Return memory for a state of a parameter: spread as the parameter is, if it has its shape."""
    if not isinstance(shape, torch.Tensor):
        return shape
    if tuple(shape.shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=shape.dtype)
    return torch.zeros(shape.shape, dtype=shape.dtype)


def _install(optimizer: torch.optim.Optimizer, counted: dict[str, Any], source: object) -> None:
    _check_groups(optimizer.param_groups, counted["param_groups"], source)
    optimizer.load_state_dict(counted)


def _check_groups(here: list[dict[str, Any]], there: list[dict[str, Any]], source: object) -> None:
    own, saved = ([len(group["params"]) for group in groups] for groups in (here, there))
    if own != saved:
        raise CheckpointError(
            f"{str(source)!r} is of an optimizer with {saved} parameters in its groups, and the one here has {own}: it is "
            "of another model, or the groups were made otherwise. Build the optimizer as it was when it was saved."
        )


def _fsdp1_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with _without_torchs_own_warnings():
        state: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer))
    # Units are flattened one by one, so torch lists parameters by unit; others count them as they are in the model.
    order = {name: number for number, name in enumerate(_fsdp1_order(model, optimizer))}
    for group in state["param_groups"]:
        group["params"] = sorted(group["params"], key=lambda name: order.get(name, len(order)))
    return state


@contextmanager
def _without_torchs_own_warnings() -> Iterator[None]:
    """Silence what version 1 says about functions that it calls itself (torch 2.9 to 2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _fsdp1_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of parameters as the optimizer was given them, or as the model has them if they were joined."""
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(flat_parameter_names(parameter) for parameter in given):
        kept: Originals = model.__dict__[ORIGINALS]
        return list(kept.shapes)
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in given if id(parameter) in names]


def _load_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Path | dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    held = _fsdp1_state(model, optimizer)
    if isinstance(saved, Path):
        boxed = {"optimizer": held}
        sharded.load_into(boxed, saved)
        held = boxed["optimizer"]
    else:
        fill_from_first(held, _by_name(saved, held["param_groups"]) if saved else {})
    with _without_torchs_own_warnings():
        if any(CHECKPOINT_WRAPPER in name.split(".") for name, _ in model.named_parameters()):
            optimizer.load_state_dict(_fsdp1_flattened(model, optimizer, held))
        else:
            set_optimizer_state_dict(model, optimizer, held)


def _fsdp1_flattened(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in the form of the flat parameters.

    torch 2.9 to 2.13 save parameters of blocks that compute their activations again under their plain names, and then
    look for them under the names of the wrappers.
    """
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)


def _by_name(saved: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a whole state by the names that the parameters have here."""
    counted = sharded.by_position(saved)
    _check_groups(groups, counted["param_groups"], "the checkpoint")
    names = [name for group in groups for name in group["params"]]
    named = [{**group, "params": own["params"]} for group, own in zip(counted["param_groups"], groups, strict=True)]
    return {"state": {names[index]: entry for index, entry in counted["state"].items()}, "param_groups": named}
