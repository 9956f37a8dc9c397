"""The state of models and optimizers that all ranks hold together: collected in shards, and put back in any layout."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import sharded
from accelerate.checkpointing.parts import by_position
from accelerate.collectives import communicator
from accelerate.parallel.compile import CHECKPOINT_WRAPPER
from accelerate.parallel.unwrap import extract_model_from_parallel, plain_name, plain_optimizer
from accelerate.runtime import current
from accelerate.runtime.torch_private import flat_parameter_names
from accelerate.strategies.broadcast_weights import broadcast_state
from accelerate.strategies.tools import gather_full, parameter_names

StateDict = dict[str, Any]


@dataclass(frozen=True)
class UnshardedParameters:
    """The parameters of a model as the user knows them, below the wrappers of engines.

    Args:
        shapes: Name -> full shape, in the order of the model.
        tied: The names of each parameter that has several.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: list[list[str]]

    _KEPT = "_unsharded_parameters"

    @classmethod
    def of(cls, model: nn.Module) -> UnshardedParameters:
        """Return what was kept of a model before version 1 of FSDP flattened it, else look at it; no rank waits."""
        kept: UnshardedParameters | None = model.__dict__.get(cls._KEPT)
        if kept is not None:
            return kept
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        shapes: dict[str, tuple[int, ...]] = {}
        aliases: dict[int, list[str]] = {}
        for path, parameter in inner.named_parameters(remove_duplicate=False):
            name = plain_name(path)
            shapes[name] = tuple(parameter.shape)
            aliases.setdefault(id(parameter), []).append(name)
        return cls(shapes, [group for group in aliases.values() if len(group) > 1])

    def keep_on(self, model: nn.Module) -> None:
        """Keep this with a model that is flattened by now."""
        model.__dict__[self._KEPT] = self


# --- models ----------------------------------------------------------------------------------------------------------


def model_state(model: nn.Module) -> StateDict:
    """Return the weights and buffers of a model in shards; every rank calls it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    # Without a copy to the CPU: FSDP 1 raises there or ends the process (torch 2.13), and elsewhere each tensor is moved
    # when it is full.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")  # full weights are no surprise there
        return get_model_state_dict(model)


def load_model_state(
    model: nn.Module, saved: Path | StateDict, *, strict: bool = True, names: Mapping[str, str] | None = None
) -> Any:
    """Restore weights from a folder of shards, or from full ones that rank 0 has; every rank calls it.

    Args:
        strict: Take nothing but all weights of the model.
        names: Name in what was saved -> name in the model, of the weights to restore; by default all, as they are.

    Returns:
        The keys that did not match.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    present = model_state(model)
    names = {name: name for name in present} if names is None else names
    state = {name: present[inner] for name, inner in names.items()}
    if isinstance(saved, Path):
        state = _load_shards(state, "model", saved)
    else:
        kept = {} if strict else gather_full(state, keep=current.runtime().rank == 0)
        broadcast_state(state, {**kept, **saved})
    restored = {names[name]: value for name, value in state.items()}
    return set_model_state_dict(model, restored, options=StateDictOptions(strict=strict))


# --- optimizers ------------------------------------------------------------------------------------------------------


def optimizer_state(model: nn.Module, optimizer: Any) -> StateDict:
    """Return the state in shards, with the names of parameters in place of their numbers.

    torch's own helper takes a step first with an optimizer that has none yet, which counts as one afterwards.
    """
    plain = plain_optimizer(optimizer)
    if is_fsdp1(model):
        return _fsdp1_state(model, plain)
    names = parameter_names(model)
    groups = [{**group, "params": [names[id(entry)] for entry in group["params"]]} for group in plain.param_groups]
    state = {names[id(parameter)]: dict(entry) for parameter, entry in plain.state.items() if id(parameter) in names}
    return {"state": state, "param_groups": groups}


def load_optimizer_state(model: nn.Module, optimizer: Any, saved: Path | StateDict, *, is_stage: bool = False) -> None:
    """Restore a state from a folder of shards, or from a full state that rank 0 has; every rank calls it.

    Args:
        is_stage: Other ranks hold other parameters, so that more of them were saved than are here.

    Raises:
        CheckpointError: If it is of another optimizer.
    """
    plain = plain_optimizer(optimizer)
    if is_fsdp1(model):
        _load_fsdp1(model, plain, saved)
    elif isinstance(saved, Path):
        _load_from_shards(model, plain, saved, is_stage=is_stage)
    else:
        _load_from_rank0(model, plain, saved)


def _load_from_shards(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, *, is_stage: bool) -> None:
    """Allocate what was saved, in the layout of this run, and fill it."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    here = _names_in_groups(model, optimizer)
    parameters = [entry for group in optimizer.param_groups for entry in group["params"]]
    by_name = dict(zip((name for group in here for name in group), parameters, strict=True))
    metadata = sharded.read_metadata(folder)
    paths = metadata.planner_data or {}
    flat = sharded.read_entries(
        folder, metadata, [key for key in metadata.state_dict_metadata if paths[key][1] == "param_groups"]
    )
    groups = sharded.unflatten({key: paths[key][1:] for key in flat}, flat)["param_groups"]
    if is_stage:
        groups = [{**group, "params": [name for name in group["params"] if name in by_name]} for group in groups]
    state: dict[str, StateDict] = {}
    for key, entry in metadata.state_dict_metadata.items():
        _, part, name, *field = paths[key]
        if part != "state" or name not in by_name:
            continue
        shape = None
        if isinstance(entry, TensorStorageMetadata):
            shape = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        state.setdefault(name, {})[field[0]] = _allocate_like(shape, by_name[name])
    if state:
        state = _load_shards({"state": state}, "optimizer", folder)["state"]
    saved = _by_position({"state": state, "param_groups": groups}, here)
    _check_groups(here, saved["param_groups"], folder)
    optimizer.load_state_dict(saved)


def _load_from_rank0(model: nn.Module, optimizer: torch.optim.Optimizer, full: StateDict) -> None:
    """Allocate what rank 0 has, in the layout of this run, and fill it from there."""
    ranks = communicator()
    here = _names_in_groups(model, optimizer)
    saved: StateDict = {"state": {}}
    shared: list[Any] = [None]
    if ranks.rank == 0:
        saved = _by_position(full, here)
        shapes = {
            index: {
                name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in entry.items()
            }
            for index, entry in saved["state"].items()
        }
        shared = [{"state": shapes, "param_groups": saved["param_groups"]}]
    ranks.broadcast_objects(shared)
    state, groups = shared[0]["state"], shared[0]["param_groups"]
    _check_groups(here, groups, "optimizer.bin")
    parameters = [entry for group in optimizer.param_groups for entry in group["params"]]
    for index, entry in state.items():
        entry.update({name: _allocate_like(value, parameters[index]) for name, value in entry.items()})
    broadcast_state(state, saved["state"])
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _allocate_like(shape: Any, parameter: torch.Tensor) -> Any:
    """Return memory for a state of a parameter: split as the parameter is, if it has its shape."""
    if not isinstance(shape, torch.Tensor):
        return shape
    if tuple(shape.shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=shape.dtype)
    return torch.zeros(shape.shape, dtype=shape.dtype)


def _names_in_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters, group by group; one of another model has a name of its own."""
    names = parameter_names(model)
    return [[names.get(id(entry), f"<{id(entry)}>") for entry in group["params"]] for group in optimizer.param_groups]


def _by_position(saved: StateDict, here: Sequence[Sequence[str]]) -> StateDict:
    """Return a saved state by the positions that its parameters have here: found by name, else in the order saved."""
    groups = list(saved["param_groups"])
    if [set(group["params"]) for group in groups] == [set(names) for names in here]:
        groups = [{**group, "params": list(names)} for group, names in zip(groups, here, strict=True)]
    return by_position({"state": saved["state"], "param_groups": groups})


def _check_groups(here: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]], source: object) -> None:
    own, there = [len(names) for names in here], [len(group["params"]) for group in saved]
    if own != there:
        raise CheckpointError(
            f"{str(source)!r} is of an optimizer with {there} parameters in its groups, and the one here has {own}: it is "
            "of another model, or the groups were made otherwise. Build the optimizer as it was when it was saved."
        )


# --- version 1 of FSDP, whose state torch collects -------------------------------------------------------------------


def is_fsdp1(model: nn.Module) -> bool:
    """Return whether a model is wrapped by version 1 of FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return isinstance(model, FullyShardedDataParallel)


def _fsdp1_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with _without_torchs_own_warnings():
        state: StateDict = dict(get_optimizer_state_dict(model, optimizer))
    # Units are flattened one by one, so torch lists parameters by unit. They are counted as the optimizer was given them,
    # or as they are in the model if they were joined.
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(flat_parameter_names(parameter) for parameter in given):
        order = list(UnshardedParameters.of(model).shapes)
    else:
        names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        order = [names[id(parameter)] for parameter in given if id(parameter) in names]
    position = {name: number for number, name in enumerate(order)}
    for group in state["param_groups"]:
        group["params"] = sorted(group["params"], key=lambda name: position.get(name, len(position)))
    return state


def _load_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Path | StateDict) -> None:
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    state = _fsdp1_state(model, optimizer)
    if isinstance(saved, Path):
        state = _load_shards(state, "optimizer", saved)
    else:
        broadcast_state(state, _by_name(saved, state["param_groups"]) if saved else {})
    with _without_torchs_own_warnings():
        if not any(CHECKPOINT_WRAPPER in name.split(".") for name, _ in model.named_parameters()):
            set_optimizer_state_dict(model, optimizer, state)
            return
        # torch 2.9 to 2.13 save parameters of blocks that compute their activations again under their plain names, and
        # then look for them under the names of the wrappers. So they get the form of the flat parameters here.
        configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
            flattened = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(flattened)


def _by_name(saved: StateDict, groups: Sequence[Mapping[str, Any]]) -> StateDict:
    """Return a full state by the names that the parameters have here."""
    here = [list(group["params"]) for group in groups]
    counted = _by_position(saved, here)
    _check_groups(here, counted["param_groups"], "the checkpoint")
    names = [name for group in here for name in group]
    named = [{**group, "params": own} for group, own in zip(counted["param_groups"], here, strict=True)]
    return {"state": {names[index]: entry for index, entry in counted["state"].items()}, "param_groups": named}


@contextmanager
def _without_torchs_own_warnings() -> Iterator[None]:
    """Silence what version 1 says about functions that it calls itself (torch 2.9 to 2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- folders of shards -----------------------------------------------------------------------------------------------


def write_shards(state: StateDict, key: str, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write a state with torch's distributed checkpoint, which any number of processes can read; every rank calls it."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with sharded.without_group_warning():
        save({key: state}, storage_writer=FileSystemWriter(folder), process_group=group)


def _load_shards(state: StateDict, key: str, folder: Path) -> StateDict:
    """Return a state with the values that a folder has for it; its tensors are filled in place."""
    boxed = {key: state}
    sharded.load_into(boxed, folder)
    return boxed[key]
