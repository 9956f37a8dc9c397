"""The memory that a model takes, whole or on one of several processes, computed from the list of its tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from accelerate._base.errors import ConfigurationError
from accelerate.offload.inventory import TensorEntry

# Bits that one floating-point element takes in each dtype.
DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
TRAINABLE_DTYPES = ("float32", "float16", "bfloat16")
FLOAT32 = 4


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
        working: What is there for a moment only: gathered layers, communication buckets, casts.
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
class Model:
    """The tensors of a model, with the sums that estimates need."""

    tensors: tuple[TensorEntry, ...]

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
        return sum(size_in(entry, dtype) for entry in self.tensors)

    def largest_layer(self, dtype: str) -> Layer:
        """Return the layer that takes the most bytes in a dtype."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for entry in self.tensors:
            sizes[entry.layer] += size_in(entry, dtype)
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


def size_in(entry: TensorEntry, dtype: str) -> int:
    """Return the bytes of a tensor in a dtype; integers and booleans keep their size."""
    return -(-entry.elements * DTYPE_BITS[dtype] // 8) if entry.floating else entry.stored_bytes


def training_memory(model: Model, dtype: str) -> TrainingMemory | None:
    """Return what training with Adam takes on one process, or None for a dtype that is not trained.

    Weights, gradients and both moments are float32; a 16-bit dtype stands for mixed precision, whose 16-bit copies
    of the weights live during the forward pass.
    """
    if dtype not in TRAINABLE_DTYPES:
        return None
    trained = FLOAT32 * model.parameters
    return TrainingMemory(
        weights=trained + model.untrained_bytes(FLOAT32),
        gradients=trained,
        optimizer=2 * trained,
        working=_cast_copies(model, dtype),
    )


def per_rank(model: Model, dtype: str, num_processes: int) -> dict[str, TrainingMemory]:
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
    return {
        "DDP": _ddp(model, dtype, num_processes),
        "FSDP": _fsdp(model, dtype, num_processes),
        "ZeRO-1": _zero(model, dtype, num_processes, stage=1),
        "ZeRO-2": _zero(model, dtype, num_processes, stage=2),
        "ZeRO-3": _zero(model, dtype, num_processes, stage=3),
    }


def in_layout(model: Model, dtype: str, *, fsdp: int = 1, tp: int = 1) -> TrainingMemory:
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
    split = Model(tuple(replace(entry, shape=_split_shape(entry, tp)) for entry in model.tensors))
    own = FLOAT32 * _rows_of_first_rank([entry.shape for entry in split.tensors if entry.trainable], fsdp)
    return TrainingMemory(
        weights=own + split.untrained_bytes(FLOAT32),
        gradients=own,
        optimizer=2 * own,
        working=_gathered(split, dtype) if fsdp > 1 else _cast_copies(split, dtype),
    )


def _split_shape(entry: TensorEntry, tp: int) -> tuple[int, ...]:
    """Return the part of a tensor on the first of the ranks that split a layer, cut along either dimension."""
    if not entry.trainable or len(entry.shape) < 2:
        return entry.shape
    return (*entry.shape[:-1], -(-entry.shape[-1] // tp))


def _cast_copies(model: Model, dtype: str) -> int:
    element = DTYPE_BITS[dtype] // 8
    return 0 if element == FLOAT32 else element * model.parameters


def _ddp(model: Model, dtype: str, num_processes: int) -> TrainingMemory:
    trained = FLOAT32 * model.parameters
    # DDP sends gradients in buckets, which are a second copy unless gradient_as_bucket_view is set.
    buckets = trained if num_processes > 1 else 0
    return TrainingMemory(
        weights=trained + model.untrained_bytes(FLOAT32),
        gradients=trained,
        optimizer=2 * trained,
        working=buckets + _cast_copies(model, dtype),
    )


def _fsdp(model: Model, dtype: str, num_processes: int) -> TrainingMemory:
    shard = FLOAT32 * _rows_of_first_rank([entry.shape for entry in model.tensors if entry.trainable], num_processes)
    return TrainingMemory(
        weights=shard + model.untrained_bytes(FLOAT32),
        gradients=shard,
        optimizer=2 * shard,
        working=_gathered(model, dtype),
    )


def _zero(model: Model, dtype: str, num_processes: int, *, stage: int) -> TrainingMemory:
    element = DTYPE_BITS[dtype] // 8
    whole = model.parameters
    shard = -(-whole // num_processes)
    if stage == 3:  # each parameter is cut by itself, and filled up to a multiple of the processes
        shard = sum(-(-entry.elements // num_processes) for entry in model.tensors if entry.trainable)
    return TrainingMemory(
        weights=element * (shard if stage == 3 else whole) + model.untrained_bytes(element),
        gradients=element * (shard if stage >= 2 else whole),
        # A float32 copy of the weights and two moments, also where the weights are float32 already.
        optimizer=3 * FLOAT32 * shard,
        working=_gathered(model, dtype) if stage == 3 else 0,
    )


def _gathered(model: Model, dtype: str) -> int:
    """Return the largest layer, brought together in the dtype of the computation, and its gradients."""
    return 2 * (DTYPE_BITS[dtype] // 8) * model.largest_trained_layer()


def _rows_of_first_rank(shapes: Sequence[tuple[int, ...]], num_processes: int) -> int:
    """Return the elements of the first process, which has the most: parameters are cut along their first dimension."""
    return sum(-(-shape[0] // num_processes) * math.prod(shape[1:]) if shape else 1 for shape in shapes)
