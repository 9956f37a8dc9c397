"""What a part of a checkpoint is, and the parts that are prepared objects: models, optimizers, schedulers, scaler."""

from __future__ import annotations

import logging
import math
import pickle
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from accelerate._base import constants
from accelerate._base.errors import CheckpointError, MissingFileError, WrongTypeError, printable
from accelerate._base.untrusted import is_utf8, shown
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.manifest import Manifest
from accelerate.checkpointing.sharded import ShardFolder, by_position, is_sharded
from accelerate.checkpointing.torch_files import allows_pickle, broken, load_in_threads, refusal
from accelerate.offload.safetensors_format import drop_shared_names, identity_in_memory
from accelerate.parallel.unwrap import extract_model_from_parallel, plain_optimizer
from accelerate.runtime import current

_LOG = logging.getLogger(__name__)
_SHOWN = 3


@dataclass(frozen=True)
class Prepared:
    """The prepared objects of a run, whose state a strategy divides into parts.

    Args:
        safe_serialization: Write weights as safetensors.
        restore_positions: Bring loaders back to where they stood.
        engine_options: Arguments of an engine that writes files of its own.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    safe_serialization: bool = True
    restore_positions: bool = True
    engine_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is read.

    Args:
        rank: The rank that reads.
        world_size: The ranks that read.
        manifest: The manifest of the checkpoint, None if another library wrote it.
        map_location: Where tensors are put while they are read.
        load_kwargs: Arguments of `torch.load`.
        model_kwargs: Arguments of `load_state_dict` of models.
    """

    rank: int = 0
    world_size: int = 1
    manifest: Manifest | None = None
    map_location: torch.device | str = "cpu"
    load_kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def allows_pickle(self) -> bool:
        """Whether files may run code while they are read: only if the program or its user asked for it by name."""
        return allows_pickle(self.load_kwargs)

    @property
    def saved_world_size(self) -> int:
        """The number of ranks that wrote the checkpoint; that of this run where it is not known."""
        return self.manifest.world_size if self.manifest is not None else self.world_size


def load_options(
    map_location: str | None, load_kwargs: Mapping[str, Any], model_kwargs: Mapping[str, Any], *, rank: int
) -> LoadOptions:
    """Return how a checkpoint is read by one of the processes of this run.

    Raises:
        WrongTypeError: (a TypeError) if `map_location` is not one of the places that are known.
    """
    if map_location not in (None, "cpu", "on_device"):
        raise WrongTypeError(
            f"map_location={map_location!r} was given, which is no place to read to. Write 'cpu' or 'on_device'."
        )
    runtime = current.runtime()
    on_device = map_location == "on_device" or (map_location is None and runtime.is_distributed)
    if runtime.backend.records_operations:
        on_device = False  # each value that is read would be recorded; it is copied from host memory instead
    return LoadOptions(
        rank=rank,
        world_size=runtime.world_size,
        map_location=runtime.device if on_device else "cpu",
        load_kwargs=load_kwargs,
        model_kwargs=model_kwargs,
    )


class Part(Protocol):
    """One thing that is saved and restored.

    A save takes a snapshot and then writes it, perhaps in another thread while training goes on. A load reads all parts
    before it restores the first, so that a checkpoint that cannot be read changes nothing.
    """

    @property
    def name(self) -> str:
        """What this is, for messages."""

    @property
    def everywhere(self) -> bool:
        """Whether every rank saves; otherwise the leading one saves for all."""

    def snapshot(self) -> Any:
        """Return the state as it is, without copying it. All ranks may take part."""

    def write(self, payload: Any, folder: FolderWriter) -> None:
        """Write a snapshot; ranks that write together talk over the folder's process group."""

    def read(self, folder: Path, options: LoadOptions) -> Any:
        """Return the state in a checkpoint, without changing anything; raise if it does not fit."""

    def restore(self, payload: Any) -> None:
        """Take over what was read."""


class Stateful(Protocol):
    """What can be saved."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state."""


def indexed(stem: str, index: int, ending: str) -> str:
    """Return the name of the file of one of several objects; the first has no number."""
    return f"{stem}_{index}{ending}" if index else f"{stem}{ending}"


def read_torch(path: Path, options: LoadOptions, **overrides: Any) -> Any:
    """Read a torch file of a checkpoint, without running code from it unless that was asked for by name.

    Raises:
        CheckpointError: If it is not there, cannot be read, or would run code.
    """
    keywords: dict[str, Any] = {"map_location": options.map_location, **options.load_kwargs, **overrides}
    keywords["weights_only"] = not options.allows_pickle
    try:
        return load_in_threads(path, **keywords)
    except FileNotFoundError as error:
        raise MissingFileError(
            f"{str(path)!r} is missing: the checkpoint is not whole, or was saved by a run with fewer objects. Prepare "
            "and register the same objects as when it was saved, or use another checkpoint."
        ) from error
    except pickle.UnpicklingError as error:
        if options.allows_pickle:
            raise CheckpointError(broken(path, error)) from error
        raise CheckpointError(refusal(path, error)) from error
    except Exception as error:  # whatever torch's readers, and those below them, make of broken bytes
        raise CheckpointError(broken(path, error)) from error


def as_mapping(value: Any, origin: str) -> Mapping[Any, Any]:
    """Return what a file of a checkpoint holds, if it is a dictionary, as all states are."""
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"{origin} holds {shown(value)}, and the state of an object is a dictionary: it is broken. Use another checkpoint."
        )
    return value


def read_weights(folder: Path, index: int, options: LoadOptions) -> dict[str, Any]:
    """Return the weights of a model in a checkpoint, whole, whatever run wrote them.

    Raises:
        CheckpointError: If they are not there or cannot be read.
    """
    safe = folder / indexed(constants.SAFE_MODEL_NAME, index, ".safetensors")
    shards = folder / f"{constants.FSDP_MODEL_NAME}_{index}"
    gathered = folder / indexed(constants.FSDP_MODEL_NAME, index, ".bin")
    if safe.is_file():
        try:
            # safetensors opens no paths that are not UTF-8, and knows only some of the devices that torch knows.
            weights = load_file(safe) if is_utf8(safe) else load(safe.read_bytes())
            return {name: value.to(options.map_location) for name, value in weights.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(broken(safe, error)) from error
    if is_sharded(shards):
        return dict(ShardFolder(shards, options.allows_pickle).read_whole()["model"])
    plain = folder / indexed(constants.MODEL_NAME, index, ".bin")
    file = gathered if gathered.is_file() else plain
    return dict(as_mapping(read_torch(file, options), repr(str(file))))


class WeightsPart:
    """Weights that are at hand, to be written.

    Args:
        safe_serialization: Write safetensors.
    """

    everywhere = False

    def __init__(self, weights: Mapping[str, Any] | None, index: int = 0, *, safe_serialization: bool = True) -> None:
        self.name = f"model {index}"
        self.index = index
        self.safe_serialization = safe_serialization
        self._weights = weights

    def weights(self) -> Mapping[str, Any]:
        """Return the weights by name."""
        return self._weights if self._weights is not None else {}

    def snapshot(self) -> Any:
        return self.weights()

    def write(self, payload: Any, folder: FolderWriter) -> None:
        if self.safe_serialization:
            weights = dict(payload)
            drop_shared_names(weights)  # they are tied again when the weights are read
            file = indexed(constants.SAFE_MODEL_NAME, self.index, ".safetensors")
            folder.write_tensors(file, weights, {"format": "pt"})
        else:
            folder.write_torch(indexed(constants.MODEL_NAME, self.index, ".bin"), payload, self.name)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        return read_weights(folder, self.index, options)

    def restore(self, payload: Any) -> None:
        self._weights = payload


class ModelPart(WeightsPart):
    """A model."""

    def __init__(self, model: torch.nn.Module, index: int = 0, *, safe_serialization: bool = True) -> None:
        super().__init__(None, index, safe_serialization=safe_serialization)
        # Without a compiled shell, so that names do not depend on whether a run compiles.
        self.model = extract_model_from_parallel(model, keep_torch_compile=False)
        self._keywords: Mapping[str, Any] = {}

    def weights(self) -> Mapping[str, Any]:
        return self.model.state_dict()

    def read(self, folder: Path, options: LoadOptions) -> Any:
        self._keywords = options.model_kwargs
        found = read_weights(folder, self.index, options)
        own = self.weights()
        _add_tied_names(found, own)
        self._check(own, found, folder, strict=self._keywords.get("strict", True))
        return found

    def _check(self, own: Mapping[str, Any], found: Mapping[str, Any], folder: Path, *, strict: bool) -> None:
        tensors = {name: value for name, value in found.items() if isinstance(own.get(name), torch.Tensor)}
        reasons = [
            f"{name!r} is {shown(value)}" for name, value in tensors.items() if not isinstance(value, torch.Tensor)
        ]
        if strict and not reasons:
            reasons += [f"{name!r} is missing" for name in own if name not in found]
            reasons += [f"{name!r} is not in the model" for name in found if name not in own]
            reasons += [
                f"{name!r} has the shape {tuple(value.shape)} instead of {tuple(own[name].shape)}"
                for name, value in tensors.items()
                if own[name].shape != value.shape
            ]
        if reasons:
            stems = (constants.SAFE_MODEL_NAME, ".safetensors"), (constants.MODEL_NAME, ".bin")
            files = [folder / indexed(stem, self.index, ending) for stem, ending in stems]
            source = next((file for file in files if file.is_file()), folder)
            more = f" and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
            raise CheckpointError(
                f"The weights of {self.name} in {str(source)!r} are not those of this {type(self.model).__name__}: "
                f"{', '.join(reasons[:_SHOWN])}{more}. Build the model as it was when the checkpoint was saved, or write "
                "load_state(..., strict=False) to take over what fits."
            )

    def restore(self, payload: Any) -> None:
        self.model.load_state_dict(payload, **self._keywords)


def _add_tied_names(found: dict[str, Any], own: Mapping[str, Any]) -> None:
    """Enter a tensor that the model has under several names, and the file under one of them, under all."""
    groups: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, value in own.items():
        identity = identity_in_memory(value) if isinstance(value, torch.Tensor) else None
        if identity is not None:
            groups[identity].append(name)
    for group in groups.values():
        saved = next((name for name in group if name in found), None)
        if saved is not None:
            found.update({name: found[saved] for name in group if name not in found})


class ObjectPart:
    """An object whose state is one file, the same on all ranks; what was read as None is not restored."""

    everywhere = False

    def __init__(self, name: str, file: str, held: Stateful) -> None:
        self.name = name
        self.file = file
        self.held = held

    def snapshot(self) -> Any:
        return self.held.state_dict()

    def write(self, payload: Any, folder: FolderWriter) -> None:
        folder.write_torch(self.file, payload, self.name)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        return read_torch(folder / self.file, options)

    def restore(self, payload: Any) -> None:
        if payload is not None:
            self.held.load_state_dict(payload)


class OptimizerPart(ObjectPart):
    """An optimizer."""

    def __init__(self, optimizer: Any, index: int = 0) -> None:
        super().__init__(f"optimizer {index}", indexed(constants.OPTIMIZER_NAME, index, ".bin"), optimizer)
        self.optimizer = optimizer
        self._shards = f"{constants.OPTIMIZER_NAME}_{index}"

    def read(self, folder: Path, options: LoadOptions) -> Any:
        shards = folder / self._shards
        if is_sharded(shards):
            saved_state = ShardFolder(shards, options.allows_pickle).read_whole()["optimizer"]
        else:
            saved_state = super().read(folder, options)
        origin = repr(str(folder / self.file))
        check_optimizer_file(saved_state, origin)
        state = by_position(saved_state)  # a run that shards saves by the names of parameters
        own_groups: list[dict[str, Any]] = self.optimizer.param_groups
        saved, own = ([len(group["params"]) for group in groups] for groups in (state["param_groups"], own_groups))
        if saved != own:
            raise CheckpointError(
                f"{origin} is of an optimizer with {saved} parameters in its groups, and the one here "
                f"has {own}: it is of another model, or the groups were made otherwise. Build the optimizer as it was "
                "when the checkpoint was saved."
            )
        parameters = (parameter for group in own_groups for parameter in group["params"])
        check_optimizer_state(
            self.optimizer, state, {number: tuple(entry.shape) for number, entry in enumerate(parameters)}, origin
        )
        # Torch counts steps in host memory, or moves the counts itself for kernels that read them. Counts on a device
        # would make the host wait for it in every step.
        for entry in state["state"].values():
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].cpu()
        return state


def check_optimizer_file(state: Any, origin: str) -> None:
    """Raise a CheckpointError unless a value has the structure of a torch optimizer's state."""
    found = as_mapping(state, origin)
    groups, held = found.get("param_groups"), found.get("state")
    if not isinstance(groups, list) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    ):
        raise CheckpointError(f"{origin} has no groups of parameters: it is broken. Use another checkpoint.")
    for key, entry in as_mapping(held, origin).items():
        if isinstance(key, int):  # of a parameter; what an optimizer keeps beside them is its own
            as_mapping(entry, origin)


def check_optimizer_state(
    optimizer: Any, state: Mapping[str, Any], shapes: Mapping[Any, tuple[int, ...]], origin: str
) -> None:
    """Refuse values that torch's `load_state_dict` accepts and the next step would fail on.

    Args:
        state: The saved state; tensors may be on the meta device.
        shapes: The shape of each parameter, by the keys of the state.
        origin: The file, for messages.

    Raises:
        CheckpointError: If an option of a group or a value of a parameter cannot belong to this optimizer.
    """
    plain = plain_optimizer(optimizer)
    kind = type(plain).__name__
    # Other optimizers may keep states of any shape; so does LBFGS, which flattens all parameters.
    is_known = f"{type(plain).__module__}.".startswith("torch.optim.") and not isinstance(plain, torch.optim.LBFGS)
    for number, (own, saved) in enumerate(zip(plain.param_groups, state["param_groups"], strict=False)):
        for name in sorted(own.keys() & ({"lr", *saved} - {"params"})):
            value = saved.get(name)
            is_missing = value is None and isinstance(own[name], int | float) and not isinstance(own[name], bool)
            # Optimizers of torch unpack their betas in each step.
            is_cut = (
                is_known
                and isinstance(own[name], tuple)
                and isinstance(value, list | tuple)
                and len(value) != len(own[name])
            )
            is_nan = isinstance(value, float) and math.isnan(value)
            if is_missing or is_cut or is_nan or _is_other_kind(own[name], value):
                raise CheckpointError(
                    f"{origin} holds {name}={shown(value)} in group {number}, and this {kind} has {shown(own[name])}: it is of "
                    "another optimizer, or broken. Use another checkpoint."
                )
    for key, entry in state["state"].items():
        if isinstance(key, int) and key not in shapes:
            raise CheckpointError(
                f"{origin} holds a state of parameter {key}, and this {kind} has {len(shapes)} parameters: it is of another "
                "optimizer, or broken. Use another checkpoint."
            )
        found = as_mapping(entry, origin) if is_known and key in shapes else {}
        missing = [name for name in _READ_IN_EACH_STEP.get(kind, ()) if found and name not in found]
        if missing:
            raise CheckpointError(
                f"{origin} has no {missing[0]!r} of parameter {key!r}, which {kind} reads in each step: it is of another "
                "optimizer, or broken. Use another checkpoint."
            )
        for name, value in found.items():
            if not _is_state_of(shapes[key], name, value):
                given = f"the shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else shown(value)
                raise CheckpointError(
                    f"{origin} holds {shown(name)} of parameter {key!r} with {given}, and the parameter of this {kind} has the "
                    f"shape {shapes[key]}: it is of another optimizer, or broken. Use another checkpoint."
                )


_PER_ELEMENT = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "ax"),
}
"""States of torch's optimizers that have one number for each element of a parameter."""
_READ_IN_EACH_STEP = {
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    **dict.fromkeys(("Adam", "AdamW", "RAdam", "SparseAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "ASGD": ("step", "eta", "mu", "ax"),
    "NAdam": ("step", "exp_avg", "exp_avg_sq", "mu_product"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
}
"""States that torch's optimizers create in the first step of a parameter, and then rely on."""


def _is_state_of(shape: tuple[int, ...], name: Any, value: Any) -> bool:
    """Return whether an optimizer of torch can keep a value for a parameter: one number, or one for each element."""
    if value is None:
        return name not in _PER_ELEMENT or name == "momentum_buffer"  # of SGD before its first step
    if not isinstance(value, torch.Tensor):
        return isinstance(value, int | float) and name not in _PER_ELEMENT
    factors = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}  # of Adafactor
    if tuple(value.shape) in (shape, factors.get(name)):
        return True
    return not value.dim() and name not in _PER_ELEMENT


class SchedulerPart(ObjectPart):
    """A learning-rate scheduler."""

    def __init__(self, scheduler: Any, index: int = 0) -> None:
        super().__init__(f"scheduler {index}", indexed(constants.SCHEDULER_NAME, index, ".bin"), scheduler)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        origin = repr(str(folder / self.file))
        state = as_mapping(super().read(folder, options), origin)
        own = self.held.state_dict()
        if isinstance(own, Mapping):
            self._check(state, own, origin)
        return state

    def _check(self, state: Mapping[Any, Any], own: Mapping[Any, Any], origin: str) -> None:
        """Refuse values that a scheduler of torch would believe: it makes attributes of whatever it is given."""
        scheduler = getattr(self.held, "scheduler", self.held)
        for name, value in state.items():
            # Other releases may have had other values; none had one in the place of a method, or of the optimizer.
            is_value = name in own or (isinstance(name, str) and isinstance(getattr(scheduler, name, None), _VALUES))
            if not is_value or _is_other_kind(own.get(name), value):
                raise CheckpointError(
                    f"{origin} holds {shown(name)}: {shown(value)}, which no {type(scheduler).__name__} has: it is of another "
                    "scheduler, or broken. Build the scheduler as it was when the checkpoint was saved, or use another "
                    "checkpoint."
                )


_VALUES = (type(None), bool, int, float, str, list, tuple, dict, torch.Tensor)


def _is_other_kind(own: Any, saved: Any) -> bool:
    """Return whether a saved value cannot replace another one: a string for a number, or a number for a list."""
    if isinstance(own, int | float | torch.Tensor):
        if isinstance(saved, torch.Tensor):
            return saved.numel() != (own.numel() if isinstance(own, torch.Tensor) else 1)
        return isinstance(saved, str | bytes | complex | list | tuple | dict)
    if not isinstance(own, list | tuple):
        return False
    if isinstance(saved, list | tuple):
        return any(_is_other_kind(*pair) for pair in zip(own, saved, strict=False))
    return isinstance(saved, str | bytes | int | float)


class ScalerPart(ObjectPart):
    """The gradient scaler of float16 training."""

    def __init__(self, scaler: Any) -> None:
        super().__init__("gradient scaler", constants.SCALER_NAME, scaler)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        if not (folder / self.file).is_file():
            _LOG.warning(
                "The checkpoint %s is of a run without a gradient scaler: it starts with its own scale.",
                printable(folder),
            )
            return None
        origin = repr(str(folder / self.file))
        state = as_mapping(super().read(folder, options), origin)
        wrong = [name for name in self.held.state_dict() if not isinstance(state.get(name), int | float)]
        if wrong:
            raise CheckpointError(
                f"{origin} holds {wrong[0]}={shown(state.get(wrong[0]))}, and a gradient scaler needs a number: it is broken. "
                "Use another checkpoint."
            )
        return state
