"""The state of models and optimizers that all ranks hold together, and the parts of a checkpoint that hold it.

A state is collected in shards, by the names of parameters, and put back in any layout.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from accelerate._base.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._base.errors import CheckpointError
from accelerate._base.untrusted import shown
from accelerate.checkpointing import sharded
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import (
    LoadOptions,
    OptimizerPart,
    Part,
    Prepared,
    as_mapping,
    check_optimizer_file,
    check_optimizer_state,
    indexed,
    read_torch,
    read_weights,
)
from accelerate.checkpointing.sharded import ShardFolder, by_position
from accelerate.checkpointing.torch_files import warn_of_code
from accelerate.collectives.base import communicator
from accelerate.parallel.unwrap import CHECKPOINT_WRAPPER, plain_name, plain_optimizer
from accelerate.runtime import current
from accelerate.runtime.torch_private import contiguous_placements
from accelerate.runtime.torch_private_fsdp import flat_parameter_names
from accelerate.strategies.broadcast_weights import broadcast_state
from accelerate.strategies.tools import UnshardedParameters, gather_full, parameter_names

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

StateDict = dict[str, Any]


def model_state(model: nn.Module) -> StateDict:
    """Return the weights and buffers of a model in shards; every rank calls it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    # Without a copy to the CPU: FSDP 1 raises there or ends the process (torch 2.13), and elsewhere each tensor is moved
    # when it is full.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")  # full weights are no surprise there
        return get_model_state_dict(model)


def load_model_state(
    model: nn.Module, saved: ShardFolder | StateDict, *, strict: bool = True, names: Mapping[str, str] | None = None
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
    if isinstance(saved, ShardFolder):
        state = _load_shards(state, "model", saved)
    else:
        kept = {} if strict else gather_full(state, keep=current.runtime().rank == 0)
        broadcast_state(state, {**kept, **saved})
    restored = {names[name]: value for name, value in state.items()}
    return set_model_state_dict(model, restored, options=StateDictOptions(strict=strict))


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


def load_optimizer_state(
    model: nn.Module, optimizer: Any, saved: ShardFolder | StateDict, *, is_stage: bool = False
) -> None:
    """Restore a state from a folder of shards, or from a full state that rank 0 has; every rank calls it.

    Args:
        is_stage: Other ranks hold other parameters, so that more of them were saved than are here.

    Raises:
        CheckpointError: If it is of another optimizer.
    """
    plain = plain_optimizer(optimizer)
    if is_fsdp1(model):
        _load_fsdp1(model, plain, saved)
        return
    here = _group_names(model, plain)
    parameters = (entry for group in plain.param_groups for entry in group["params"])
    by_name = dict(zip((name for group in here for name in group), parameters, strict=True))
    full: StateDict = {}
    if isinstance(saved, ShardFolder):
        shapes = dict(saved.optimizer_outline)
        groups = _of_stage(shapes["param_groups"], by_name) if is_stage else shapes["param_groups"]
        shapes["param_groups"] = _in_order(groups, here)
    else:
        shapes, full = _shapes_at_rank0(saved, here)
    _check_groups(here, shapes["param_groups"], saved.path if isinstance(saved, ShardFolder) else "optimizer.bin")
    state: StateDict = {
        name: {field: _allocate_like(shape, by_name[name]) for field, shape in entry.items()}
        for name, entry in shapes["state"].items()
        if name in by_name
    }
    if not isinstance(saved, ShardFolder):
        broadcast_state(state, full["state"])
    elif state:
        state = _load_shards({"state": state}, "optimizer", saved)["state"]
    plain.load_state_dict(by_position({"state": state, "param_groups": shapes["param_groups"]}))


def _group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each group."""
    names = parameter_names(model)
    # A parameter of another model has a name that nothing was saved under.
    return [[names.get(id(entry), f"<{id(entry)}>") for entry in group["params"]] for group in optimizer.param_groups]


def _shapes_at_rank0(saved: StateDict, here: Sequence[Sequence[str]]) -> tuple[StateDict, StateDict]:
    """Return the state of rank 0 with tensors without memory, and, there alone, with its tensors; by the names here."""
    ranks = communicator()
    full: StateDict = {"state": {}}
    shared: list[Any] = [None]
    if ranks.rank == 0:
        counted = by_position({**saved, "param_groups": _in_order(saved["param_groups"], here)})
        groups = counted["param_groups"]
        if [len(group["params"]) for group in groups] == [len(own) for own in here]:  # otherwise the caller refuses it
            names = [name for group in here for name in group]
            full["state"] = {names[index]: entry for index, entry in counted["state"].items()}
            groups = [{**group, "params": list(own)} for group, own in zip(groups, here, strict=True)]
        full["param_groups"] = groups
        shapes = {
            name: {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
            for name, entry in full["state"].items()
        }
        shared = [{"state": shapes, "param_groups": groups}]
    ranks.broadcast_objects(shared)
    return shared[0], full


def _in_order(groups: Sequence[Mapping[str, Any]], here: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return groups that name the parameters of the groups here with the names in the same order."""
    if [set(group["params"]) for group in groups] != [set(own) for own in here]:
        return [dict(group) for group in groups]
    return [{**group, "params": list(own)} for group, own in zip(groups, here, strict=True)]


def _of_stage(groups: Sequence[Mapping[str, Any]], own: Container[str]) -> list[dict[str, Any]]:
    """Return groups without the parameters of other stages of a pipeline."""
    return [{**group, "params": [name for name in group["params"] if name in own]} for group in groups]


def _check_groups(here: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]], source: object) -> None:
    own, there = [len(names) for names in here], [len(group["params"]) for group in saved]
    if own != there:
        raise CheckpointError(
            f"{str(source)!r} is of an optimizer with {there} parameters in its groups, and the one here has {own}: it is "
            "of another model, or the groups were made otherwise. Build the optimizer as it was when it was saved."
        )


def _allocate_like(shape: Any, parameter: torch.Tensor) -> Any:
    """Return memory for a state of a parameter: split as the parameter is, if it has its shape."""
    if not isinstance(shape, torch.Tensor):
        return shape
    if tuple(shape.shape) == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=shape.dtype)
    return torch.zeros(shape.shape, dtype=shape.dtype)


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


def _load_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer, saved: ShardFolder | StateDict) -> None:
    from torch.distributed import fsdp
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    state = _fsdp1_state(model, optimizer)
    if isinstance(saved, ShardFolder):
        state = _load_shards(state, "optimizer", saved)
    else:
        here = [list(group["params"]) for group in state["param_groups"]]
        shapes, full = _shapes_at_rank0(saved, here)
        _check_groups(here, shapes["param_groups"], "optimizer.bin")
        broadcast_state(state, full)
    with _without_torchs_own_warnings():
        if not any(CHECKPOINT_WRAPPER in name.split(".") for name, _ in model.named_parameters()):
            set_optimizer_state_dict(model, optimizer, state)
            return
        # torch 2.9 to 2.13 save parameters of blocks that compute their activations again under their plain names, and
        # then look for them under the names of the wrappers. So they get the form of the flat parameters here.
        wrapper, kind = fsdp.FullyShardedDataParallel, fsdp.StateDictType.SHARDED_STATE_DICT
        configs = fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig()
        with wrapper.state_dict_type(model, kind, *configs):
            flattened = wrapper.optim_state_dict_to_load(model, optimizer, state)
        optimizer.load_state_dict(flattened)


@contextmanager
def _without_torchs_own_warnings() -> Iterator[None]:
    """Silence what version 1 says about functions that it calls itself (torch 2.9 to 2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_shards(state: StateDict, key: str, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write a state with torch's distributed checkpoint, which any number of processes can read; every rank calls it."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with sharded.written_by_torch():
        save({key: state}, storage_writer=FileSystemWriter(folder), process_group=group)


def _load_shards(state: StateDict, key: str, folder: ShardFolder) -> StateDict:
    """Return a state with the values that a folder has for it; its tensors are filled in place."""
    boxed = {key: contiguous_shards(state)}
    folder.load_into(boxed)
    found: StateDict = _placed_as(boxed[key], state)
    return found


def contiguous_shards(state: Any) -> Any:
    """Return a state with packed weights in the form that torch's distributed checkpoint can describe.

    It takes a shard for one stretch of the full tensor, which a shard of a packed weight is not. Every rank calls this.
    """
    if isinstance(state, Mapping):
        return {name: contiguous_shards(value) for name, value in state.items()}
    placements = contiguous_placements(state)
    return state if placements is None else state.detach().redistribute(placements=placements)


def _placed_as(state: Any, pattern: Any) -> Any:
    """Return a state with packed weights split as those of another one."""
    if isinstance(pattern, Mapping):
        return {name: _placed_as(value, pattern.get(name)) for name, value in state.items()}
    return state if contiguous_placements(pattern) is None else state.redistribute(placements=pattern.placements)


def _without_tensors(value: Any) -> Iterator[Any]:
    """Return what a state holds beside tensors, on this rank or on all of them together."""
    if isinstance(value, Mapping):
        for entry in value.values():
            yield from _without_tensors(entry)
    elif type(value) in (list, tuple):
        for entry in value:
            yield from _without_tensors(entry)
    elif not isinstance(value, torch.Tensor) and not hasattr(value, "local_shards"):
        yield value


# --- parts of a checkpoint -------------------------------------------------------------------------------------------


class ShardedPart(ABC):
    """A state that all ranks hold together.

    In shards it is written by torch's distributed checkpoint, over a group of its own where training goes on
    meanwhile.

    Args:
        key: The name of the state inside a folder of shards.
        stem: The name of its file, or of its folder with the index.
        full: Write one file with the full state, instead of shards.

    Attributes:
        is_written_together: Ranks wait for each other inside `write`.
    """

    everywhere = True

    def __init__(self, key: str, stem: str, index: int, *, full: bool) -> None:
        self.name = f"{key} {index}"
        self.key = key
        self.index = index
        self.full = full
        self.is_written_together = not full
        self.folder_name = f"{stem}_{index}"
        self.file_name = indexed(stem, index, ".bin")

    @abstractmethod
    def state(self) -> StateDict:
        """Return the state in shards."""

    def snapshot(self) -> Any:
        state, error = None, None
        try:
            state = self.state()
            if self.full:
                state = gather_full(state, keep=current.runtime().rank == 0)
            else:
                state = contiguous_shards(state)
        except Exception as caught:  # noqa: BLE001 - the others would wait for this rank while they write
            error = caught
        failed = [text for text in communicator().gather_object(None if error is None else repr(error)) if text]
        if failed:
            raise CheckpointError(f"The state of {self.name} cannot be collected: {failed[0]}.") from error
        return state

    def write(self, payload: Any, folder: FolderWriter) -> None:
        rank = current.runtime().rank
        if self.full:
            if rank == 0:
                folder.write_torch(self.file_name, payload)
            return
        target = folder.path / self.folder_name
        if rank == 0:
            warn_of_code(list(_without_tensors(payload)), self.name)
        write_shards(payload, self.key, target, folder.process_group)
        for file in sorted(target.glob(f"__{rank}_*")):
            folder.add_written(file)
        if rank == 0:
            folder.add_written(target / sharded.METADATA)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        path = folder / self.folder_name
        if sharded.is_sharded(path):
            shards = ShardFolder(path, options.allows_pickle)
            self.check(path, shards.metadata)
            return shards
        # A full state is sent from rank 0, so that the others need no memory for it.
        return self.read_file(folder, options) if current.runtime().rank == 0 else {}

    def read_file(self, folder: Path, options: LoadOptions) -> StateDict:
        """Return a state that was saved in full."""
        file = folder / self.file_name
        return dict(as_mapping(read_torch(file, options), repr(str(file))))

    def check(self, path: Path, metadata: Metadata) -> None:  # noqa: B027 - a part may have nothing to compare
        """Raise a CheckpointError if shards are of something else."""

    @abstractmethod
    def restore(self, payload: Any) -> None:
        """Put a state that was read in place."""


class ShardedModelPart(ShardedPart):
    """A sharded model."""

    def __init__(self, model: nn.Module, index: int = 0, *, full: bool = False) -> None:
        super().__init__("model", FSDP_MODEL_NAME, index, full=full)
        self.model = model
        self._strict = True

    def state(self) -> StateDict:
        return model_state(self.model)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        self._strict = bool(options.model_kwargs.get("strict", True))
        return super().read(folder, options)

    def read_file(self, folder: Path, options: LoadOptions) -> StateDict:
        is_own = (folder / self.file_name).is_file()  # otherwise it is the checkpoint of a run that did not shard
        found = super().read_file(folder, options) if is_own else read_weights(folder, self.index, options)
        for name, shape in UnshardedParameters.of(self.model).shapes.items():
            value = found.get(name)
            if name in found and (not isinstance(value, torch.Tensor) or tuple(value.shape) != shape):
                what = (
                    f"the shape {tuple(value.shape)}"
                    if isinstance(value, torch.Tensor)
                    else f"the value {shown(value)}"
                )
                raise CheckpointError(
                    f"The weights in {str(folder)!r} are not those of this {type(self.model).__name__}: {name!r} has {what}, and "
                    f"the model has the shape {shape}. Build the model as it was when the checkpoint was saved."
                )
        for aliases in [] if is_own else UnshardedParameters.of(self.model).tied:
            saved = next((name for name in aliases if name in found), None)
            if saved is not None:
                found.update(dict.fromkeys(aliases, found[saved]))
        return found

    def check(self, path: Path, metadata: Metadata) -> None:
        shapes = UnshardedParameters.of(self.model).shapes if self._strict else {}
        for name, shape in shapes.items():
            entry = metadata.state_dict_metadata.get(f"{self.key}.{name}")
            saved = None if entry is None else tuple(getattr(entry, "size", ()))
            if saved != shape:
                raise CheckpointError(
                    f"The weights in {str(path)!r} are not those of this {type(self.model).__name__}: {name!r} has the "
                    f"shape {shape}, and there it {'is missing' if saved is None else f'has {saved}'}. Build the model as "
                    "it was when the checkpoint was saved."
                )

    def restore(self, payload: Any) -> None:
        load_model_state(self.model, payload, strict=self._strict)


class ShardedOptimizerPart(ShardedPart):
    """The optimizer of a sharded model.

    Args:
        stages: The ranks whose optimizers hold the parameters of other stages of a pipeline, written together.
    """

    def __init__(
        self,
        optimizer: Any,
        model: nn.Module,
        index: int = 0,
        *,
        full: bool = False,
        stages: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__("optimizer", OPTIMIZER_NAME, index, full=full)
        self.optimizer = optimizer
        self.model = model
        self.stages = stages

    def state(self) -> StateDict:
        state = optimizer_state(self.model, self.optimizer)
        if self.stages is not None:  # groups name the parameters of all stages
            found: list[Any] = [None] * self.stages.size()
            dist.all_gather_object(found, [group["params"] for group in state["param_groups"]], group=self.stages)
            for place, group in enumerate(state["param_groups"]):
                group["params"] = [name for stage in found for name in stage[place]]
        return state

    def read(self, folder: Path, options: LoadOptions) -> Any:
        found = super().read(folder, options)
        if isinstance(found, ShardFolder):
            self._check_state(found.optimizer_outline, found.path)
        elif current.runtime().rank == 0:  # the others are sent the state
            self._check_state(found, folder / self.file_name)
        return found

    def _check_state(self, saved: Any, path: Path) -> None:
        """Raise a CheckpointError if a state is of another optimizer, before any rank restores something."""
        check_optimizer_file(saved, repr(str(path)))
        plain = plain_optimizer(self.optimizer)
        shapes: dict[Any, tuple[int, ...]] = dict(UnshardedParameters.of(self.model).shapes)
        names: list[str] = []
        if not any(flat_parameter_names(entry) for group in plain.param_groups for entry in group["params"]):
            here = _group_names(self.model, plain)
            groups = saved["param_groups"] if self.stages is None else _of_stage(saved["param_groups"], shapes)
            _check_groups(here, groups, path)
            names = [name for group in here for name in group]
        # A run that does not shard saves parameters by number; of those that FSDP 1 has joined the numbers are not known here.
        state = {key: entry for key, entry in saved["state"].items() if names or not isinstance(key, int)}
        shapes |= {number: shapes[name] for number, name in enumerate(names) if name in shapes}
        check_optimizer_state(plain, {**saved, "state": state}, shapes, repr(str(path)))

    def restore(self, payload: Any) -> None:
        load_optimizer_state(self.model, self.optimizer, payload, is_stage=self.stages is not None)


def sharded_parts(prepared: Prepared, *, full: bool = False, stages: dist.ProcessGroup | None = None) -> list[Part]:
    """Return the parts of models and optimizers that all ranks write together.

    Args:
        full: Write full states instead of shards.
        stages: The ranks that hold the other stages of a pipeline.
    """
    parts: list[Part] = [ShardedModelPart(model, i, full=full) for i, model in enumerate(prepared.models)]
    for i, optimizer in enumerate(prepared.optimizers):
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = (model for model in prepared.models if not trained.isdisjoint(parameter_names(model)))
        # An optimizer may have no parameter of this stage; elsewhere it then trains what is in no model.
        owner = next(owners, None if stages is None else prepared.models[0])
        if owner is None:
            parts.append(OptimizerPart(optimizer, i))
        else:
            parts.append(ShardedOptimizerPart(optimizer, owner, i, full=full, stages=stages))
    return parts
