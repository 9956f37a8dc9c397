"""The memory that a model takes, whole, planned over devices or on one of several processes, from the list of its tensors.

No weights are read, and torch is loaded only where a function needs it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import number_in, shown
from accelerate.offload.safetensors_format import BITS, read_header
from accelerate.offload.weight_files import load_torch

if TYPE_CHECKING:
    import torch
    from torch import nn

# Bits that one floating-point element takes in each dtype.
DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
TRAINABLE_DTYPES = ("float32", "float16", "bfloat16")
FLOAT32 = 4
# DeepSpeed's defaults under ZeRO 3: gathered weights stay that are needed again within `stage3_max_reuse_distance`, on the
# way to the last layer and back; a step takes `sub_group_size` elements at a time.
_ZERO3_KEPT = 500_000_000
_ZERO3_STEPPED = 1_000_000_000
# Batch statistics, which a file does not tell from parameters.
_MOST_LEVELS = 3
_BUFFER_NAMES = ("running_mean", "running_var")
_Described: TypeAlias = tuple[str, tuple[int, ...], int, bool]
"""Name, shape, bits of an element and whether it is floating-point."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: what it is called, how large it is, and the layer that it belongs to.

    Args:
        bits: Bits of one element as it is stored.
        floating: Whether a change of dtype applies to it; integers and booleans keep their size.
        trainable: Whether an optimizer would have states for it.
        layer: The name of the part of the model that stays whole on a device.
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    floating: bool
    trainable: bool
    layer: str

    @cached_property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """Its size as it is stored."""
        return -(-self.elements * self.bits // 8)

    def bytes_in(self, dtype: str) -> int:
        """Return its size in a dtype; integers and booleans keep theirs."""
        return -(-self.elements * DTYPE_BITS[dtype] // 8) if self.floating else self.stored_bytes


def read_tensors(files: Iterable[Path]) -> list[TensorInfo]:
    """Return the tensors of weight files: the headers of safetensors, the structure of files that torch wrote.

    Raises:
        ConfigurationError: If a file is not what its ending says.
    """
    found: list[TensorInfo] = []
    for file in files:
        described = _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
        for name, shape, bits, floating in described:
            trainable = floating and not name.endswith(_BUFFER_NAMES)
            found.append(TensorInfo(name, shape, bits, floating, trainable, layer_of(name)))
    return found


def _read_safetensors(path: Path) -> Iterator[_Described]:
    for name, entry in read_header(path).tensors.items():
        dtype = entry["dtype"]
        if dtype not in BITS:
            raise ConfigurationError(
                f"{str(path)!r} cannot be read: its header gives {shown(name)} the dtype {shown(dtype)}, which is not known. "
                "Save or download it again, or give another file."
            )
        yield name, tuple(entry["shape"]), BITS[dtype], dtype.startswith(("F", "BF"))


def _read_torch(path: Path) -> Iterator[_Described]:
    import torch

    # On the meta device the storages are never read.
    state, _ = load_torch(path, "meta")
    tensors: dict[str, torch.Tensor] = {}
    inner: object = state
    for _ in range(_MOST_LEVELS):  # a checkpoint holds its state dict under one of the usual keys
        if isinstance(inner, Mapping) and not tensors:
            tensors = {str(name): value for name, value in inner.items() if isinstance(value, torch.Tensor)}
            inner = next((inner[key] for key in ("state_dict", "model") if key in inner), None)
    if not tensors:
        raise ConfigurationError(
            f"{str(path)!r} holds no tensors by name, but {type(state).__name__!r}. Give a file with a state dict."
        )
    seen: set[tuple[object, ...]] = set()
    for name, tensor in tensors.items():
        # A tied weight is stored once, under several names.
        identity = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        if identity not in seen:
            seen.add(identity)
            yield name, tuple(tensor.shape), tensor.dtype.itemsize * 8, tensor.is_floating_point()


def layer_of(name: str) -> str:
    """Return the layer of a tensor by its name: up to the first number (`model.layers.3`), else its own module."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) or name


def tensors_of_model(model: nn.Module) -> list[TensorInfo]:
    """Return the parameters and buffers of a model, which may lie on the meta device; tied ones count once."""
    no_split = set(getattr(model, "_no_split_modules", None) or ())
    whole: list[str] = []
    for name, module in model.named_modules():
        inside = whole and (name == whole[-1] or name.startswith(f"{whole[-1]}."))
        if name and not inside and (type(module).__name__ in no_split or next(module.children(), None) is None):
            whole.append(name)
    layers = set(whole)
    found: list[TensorInfo] = []
    for tensors, trainable in ((model.named_parameters(), True), (model.named_buffers(), False)):
        for name, tensor in tensors:
            parts = name.split(".")
            above = (".".join(parts[:end]) for end in range(1, len(parts)))
            layer = next((prefix for prefix in above if prefix in layers), name)
            trained = trainable and tensor.requires_grad
            bits, floating = tensor.dtype.itemsize * 8, tensor.is_floating_point()
            found.append(TensorInfo(name, tuple(tensor.shape), bits, floating, trained, layer))
    return found


@dataclass(frozen=True)
class Layer:
    """A part of the model that stays whole on a device."""

    name: str
    bytes: int


@dataclass(frozen=True)
class TrainingMemory:
    """The bytes that training with Adam takes on one process, without activations.

    Args:
        weights: Parameters and buffers.
        optimizer: Both moments of Adam, and the float32 copy of the weights where the engine keeps one.
        working: What is there for a moment only: gathered layers, communication buckets, casts, gradients laid out for a step.
    """

    weights: int
    gradients: int
    optimizer: int
    working: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.working


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model, with the sums that estimates need."""

    tensors: tuple[TensorInfo, ...]

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(entry.elements for entry in self.tensors if entry.trainable)

    @property
    def stored_bytes(self) -> int:
        """The size of the model as it is stored."""
        return sum(entry.stored_bytes for entry in self.tensors)

    @property
    def fixed_bytes(self) -> int:
        """The size of what keeps its dtype whatever is asked for: integers and booleans."""
        return sum(entry.stored_bytes for entry in self.tensors if not entry.floating)

    def total(self, dtype: str) -> int:
        """Return the bytes of the model in a dtype."""
        return sum(entry.bytes_in(dtype) for entry in self.tensors)

    def largest_layer(self, dtype: str) -> Layer:
        """Return the layer that takes the most bytes in a dtype."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for entry in self.tensors:
            sizes[entry.layer] += entry.bytes_in(dtype)
        name = max(sizes, key=lambda layer: sizes[layer], default="")
        return Layer(name, sizes[name] if name else 0)

    def largest_trained_layer(self) -> int:
        """Return the trained elements of the layer that has the most of them."""
        elements: defaultdict[str, int] = defaultdict(int)
        for entry in self.tensors:
            elements[entry.layer] += entry.elements if entry.trainable else 0
        return max(elements.values(), default=0)

    def untrained_bytes(self, element_bytes: int) -> int:
        """Return the bytes of all that is not trained: buffers, frozen weights, integers."""
        return sum(
            entry.elements * element_bytes if entry.floating else entry.stored_bytes
            for entry in self.tensors
            if not entry.trainable
        )


def training_memory(model: ModelTensors, dtype: str) -> TrainingMemory | None:
    """Return what training with Adam takes on one process, or None for a dtype that is not trained.

    Weights, gradients and both moments are float32; a 16-bit dtype stands for mixed precision, whose 16-bit copies
    of the weights live during the forward pass.
    """
    if dtype not in TRAINABLE_DTYPES:
        return None
    return _adam(model, model.parameters, working=_cast_copies(model, dtype))


def _adam(model: ModelTensors, trained: int, working: int) -> TrainingMemory:
    """Return what float32 training takes where a process holds `trained` of the trained elements."""
    own = FLOAT32 * trained
    return TrainingMemory(own + model.untrained_bytes(FLOAT32), gradients=own, optimizer=2 * own, working=working)


def per_rank(model: ModelTensors, dtype: str, num_processes: int) -> dict[str, TrainingMemory]:
    """Return what training with Adam takes on the fullest of several processes, by the way the model is shared.

    Raises:
        ConfigurationError: If there is no process, or the dtype is not trained.
    """
    if num_processes < 1:
        raise ConfigurationError(
            f"num_processes={num_processes!r} leaves nothing to train on. Give the number of processes, 1 or more."
        )
    if dtype not in TRAINABLE_DTYPES:
        raise ConfigurationError(
            f"There is no training in {dtype!r}: quantised weights have no gradients. Write one of {TRAINABLE_DTYPES}."
        )
    # DDP sends gradients in buckets, which are a second copy unless gradient_as_bucket_view is set.
    buckets = FLOAT32 * model.parameters if num_processes > 1 else 0
    return {
        "DDP": _adam(model, model.parameters, working=buckets + _cast_copies(model, dtype)),
        "FSDP": _adam(model, _rows_of_first_rank(model, num_processes), working=_gathered(model, dtype)),
        "ZeRO-1": _zero(model, dtype, num_processes, stage=1),
        "ZeRO-2": _zero(model, dtype, num_processes, stage=2),
        "ZeRO-3": _zero(model, dtype, num_processes, stage=3),
    }


def in_layout(model: ModelTensors, dtype: str, *, fsdp: int = 1, tp: int = 1) -> TrainingMemory:
    """Return what training with Adam takes on the fullest process when layers are split and what is left is sharded.

    Splitting cuts every matrix and leaves vectors, such as biases and the weights of norms, whole.

    Args:
        fsdp: Processes over which the weights are sharded.
        tp: Processes over which each layer is split.

    Raises:
        ConfigurationError: If there is no process, or the dtype is not trained.
    """
    for name, size in (("fsdp", fsdp), ("tp", tp)):
        if size < 1:
            raise ConfigurationError(
                f"{name}={size!r} leaves nothing to train on. Give a number of processes, 1 or more."
            )
    per_rank(model, dtype, 1)  # refuses a dtype that is not trained
    split = ModelTensors(tuple(replace(entry, shape=_split_shape(entry, tp)) for entry in model.tensors))
    working = _gathered(split, dtype) if fsdp > 1 else _cast_copies(split, dtype)
    return _adam(split, _rows_of_first_rank(split, fsdp), working)


def _split_shape(entry: TensorInfo, tp: int) -> tuple[int, ...]:
    """Return the part of a tensor on the first of the ranks that split a layer, cut along either dimension."""
    if not entry.trainable or len(entry.shape) < 2:
        return entry.shape
    return (*entry.shape[:-1], -(-entry.shape[-1] // tp))


def _cast_copies(model: ModelTensors, dtype: str) -> int:
    element = DTYPE_BITS[dtype] // 8
    return 0 if element == FLOAT32 else element * model.parameters


def _zero(model: ModelTensors, dtype: str, num_processes: int, *, stage: int) -> TrainingMemory:
    element = DTYPE_BITS[dtype] // 8
    whole = model.parameters
    shard = -(-whole // num_processes)
    if stage == 3:  # each parameter is cut by itself, and filled up to a multiple of the processes
        shard = sum(-(-entry.elements // num_processes) for entry in model.tensors if entry.trainable)
    gradients = element * (shard if stage >= 2 else whole)
    # A step lays the gradients of the shard out in a row and turns them into float32: with these, 8 bytes an element.
    for_step = 2 * FLOAT32 * shard - gradients
    brought_together = 0
    if stage == 1:  # whole gradients are there until the shard is cut out of them
        brought_together = element * shard
    elif stage == 3:
        for_step = (2 * FLOAT32 - element) * min(shard, _ZERO3_STEPPED)
        brought_together = element * (min(whole, _ZERO3_KEPT) + model.largest_trained_layer())
    return TrainingMemory(
        weights=element * (shard if stage == 3 else whole) + model.untrained_bytes(element),
        gradients=gradients,
        # A float32 copy of the weights and two moments, also where the weights are float32 already.
        optimizer=3 * FLOAT32 * shard,
        working=max(for_step, brought_together),
    )


def _gathered(model: ModelTensors, dtype: str) -> int:
    """Return the largest layer, brought together in the dtype of the computation, and its gradients."""
    return 2 * (DTYPE_BITS[dtype] // 8) * model.largest_trained_layer()


def _rows_of_first_rank(model: ModelTensors, num_processes: int) -> int:
    """Return the elements of the first process, which has the most: parameters are cut along their first dimension."""
    shapes = [entry.shape for entry in model.tensors if entry.trainable]
    return sum(-(-shape[0] // num_processes) * math.prod(shape[1:]) if shape else 1 for shape in shapes)


@dataclass(frozen=True)
class PlanRow:
    """Modules that follow each other, their bytes, their place and why they go there."""

    modules: str
    bytes: int
    place: int | str
    reason: str


def plan_report(model: ModelTensors, limits: Mapping[int | str, int], dtype: str | None = None) -> list[PlanRow]:
    """Return where the modules of a model would go, in their order; neighbours such as blocks are one row.

    Args:
        limits: The bytes that each device may take, as `get_max_memory` gives them.
        dtype: The dtype that the weights are loaded in; as they are stored if not given.
    """
    from accelerate.offload.places import DISK, prefixes
    from accelerate.offload.plan import Planner, with_units

    sizes: defaultdict[str, int] = defaultdict(int)
    for entry in model.tensors:
        size = entry.stored_bytes if dtype is None else entry.bytes_in(dtype)
        for name in prefixes(entry.name):
            sizes[name] += size
    root, whole = _skeleton(model.tensors)
    plan = Planner(root, limits, sizes, {whole}).run()
    left = [note for note in plan.notes if ": not on " in note]
    rows: list[PlanRow] = []
    for name, choice in plan.choices.items():
        reason = choice.reason
        if choice.value == DISK and left:  # the disk has room for everything: say why there is no other place
            full, _, rest = left[-1].partition(": not on ")
            place, _, why = rest.partition(", ")
            reason = f"{why} on {place}" if full == name else f"{place} is full since {full}"
        row = PlanRow(name, sizes.get(name, 0), choice.value, with_units(reason))
        joined = _joined(rows[-1], row) if rows else None
        if joined is None:
            rows.append(row)
        else:
            rows[-1] = joined
    return rows


def _skeleton(tensors: Sequence[TensorInfo]) -> tuple[nn.Module, str]:
    """Return modules and empty parameters of these names, and the name of the class of layers that stay whole."""
    import torch
    from torch import nn

    class WholeLayer(nn.Module):
        pass

    layers = {entry.layer for entry in tensors}
    modules: dict[str, nn.Module] = {"": nn.Module()}
    for entry in tensors:
        *path, key = entry.name.split(".")
        holder = modules[""]
        for depth, own in enumerate(path, start=1):
            name = ".".join(path[:depth])
            if name not in modules:
                # Written into the tables, for a file may use any name.
                holder._modules[own] = modules[name] = WholeLayer() if name in layers else nn.Module()
            holder = modules[name]
        # One element stands for the tensor: its size is looked up.
        holder._parameters[key] = nn.Parameter(torch.empty(1, device="meta"), requires_grad=False)
    return modules[""], WholeLayer.__name__


def _joined(before: PlanRow, row: PlanRow) -> PlanRow | None:
    """Return two rows as one if they are numbered neighbours in one place: `layers.0-3`."""
    above, _, number = row.modules.rpartition(".")
    first, _, last = before.modules.removeprefix(f"{above}.").partition("-")
    last = last or first
    if before.place != row.place or not before.modules.startswith(f"{above}."):
        return None
    counted, following = number_in(last), number_in(number)
    if counted is None or following != counted + 1:
        return None
    differs = row.place != "disk" and row.reason not in before.reason
    reason = f"the last one: {row.reason}" if differs else before.reason
    return PlanRow(f"{above}.{first}-{number}", before.bytes + row.bytes, row.place, reason)
