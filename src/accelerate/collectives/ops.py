"""The public operations between processes on nested containers of tensors.

Tensors may be on any device: one that the process group cannot reach is moved for the exchange, and the result comes
back on the device of the tensor that was given, so that it combines with the values next to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from accelerate._base.errors import ConfigurationError, DistributedOperationException, UsageError, WrongTypeError
from accelerate._base.helpers import user_stacklevel, warn_once
from accelerate._base.imports import require
from accelerate.collectives.base import ReduceOp, communicator
from accelerate.collectives.checked import verify
from accelerate.collectives.nested import TensorInformation, leaves, recursively_apply, send_to_device
from accelerate.collectives.packing import gather_all
from accelerate.runtime import current

TENSOR_TYPE_TO_INT: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.float64: 2,
    torch.float16: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE: dict[int, torch.dtype] = {code: dtype for dtype, code in TENSOR_TYPE_TO_INT.items()}

# "none" has always summed; programs use it under that name.
_REDUCTIONS: dict[str, ReduceOp] = {"sum": "sum", "mean": "mean", "max": "max", "min": "min", "none": "sum"}


class CannotPadNestedTensorWarning(UserWarning):
    """Warn that `pad_across_processes` returned a nested tensor unchanged."""


def gather(tensor: Any) -> Any:
    """Concatenate the tensors of all processes on the first dimension; 0-d tensors become 1-d.

    In a run with one process the value is returned as it is.

    Raises:
        WrongTypeError: for a leaf that is not a tensor.
    """
    runtime = current.runtime()
    if not runtime.is_distributed:
        return tensor
    _require_tensors("gather", tensor)
    if runtime.checked:
        verify("gather", tensor)
    if isinstance(tensor, Tensor):
        return communicator().gather(tensor)
    gathered = iter(gather_all([leaf for _, leaf in leaves(tensor)]))
    return recursively_apply(lambda _: next(gathered), tensor)


def gather_object(object: Any) -> Any:
    """Join the lists of all processes into one list; the items may be anything that pickles.

    In a run with one process the value is returned as it is.

    Raises:
        WrongTypeError: on every process, if one of them gave something that cannot be iterated over.
    """
    runtime = current.runtime()
    if not runtime.is_distributed:
        return object
    if runtime.checked:
        verify("gather_object")
    values = communicator().gather_object(object)
    for rank, value in enumerate(values):
        if not isinstance(value, Iterable):
            raise WrongTypeError(
                f"gather_object was given {value!r} of type {type(value)!r} on rank {rank}, and it joins the items of "
                "lists; wrap the value in a list"
            )
    if isinstance(object, (str, Mapping)):
        what = "characters of a string" if isinstance(object, str) else "keys of a mapping"
        message = f"gather_object joins the items of lists, so it returns the {what}; wrap the value in a list."
        warn_once(message, stacklevel=user_stacklevel())
    return [item for value in values for item in value]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite every tensor with that of `from_process`, in place, and return the structure.

    In a run with one process the value is returned unchanged.

    Raises:
        WrongTypeError: for a leaf that is not a tensor.
    """
    runtime = current.runtime()
    if not runtime.is_distributed:
        return tensor
    _require_tensors("broadcast", tensor)
    _require_rank("broadcast", from_process, runtime.world_size)
    if runtime.checked:
        verify("broadcast", tensor)
    return recursively_apply(communicator().broadcast, tensor, source=from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the entries of the list with those of `from_process`, in place, and return it.

    In a run with one process the value is returned unchanged.
    """
    runtime = current.runtime()
    if not runtime.is_distributed:
        return object_list
    if not isinstance(object_list, list):
        raise WrongTypeError(
            f"broadcast_object_list was given {object_list!r} of type {type(object_list)!r}, which it cannot overwrite "
            "in place; pass a list"
        )
    _require_rank("broadcast_object_list", from_process, runtime.world_size)
    if runtime.checked:
        verify("broadcast_object_list")
    communicator().broadcast_objects(object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine the tensors of all processes, element by element, into new tensors.

    The mean of integers is a float, the sum of bools a count. The gradient, where one is wanted, is that of this
    process's own share.

    Args:
        reduction: "sum", "mean", "max" or "min"; "none" sums.
        scale: not used on this device.

    Raises:
        WrongTypeError: for a leaf that is not a tensor.
        ConfigurationError: for an unknown reduction.
    """
    runtime = current.runtime()
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(f"reduction={reduction!r} is not known; use one of {sorted(_REDUCTIONS)}")
    _require_tensors("reduce", tensor)
    if scale != 1.0:
        message = f"reduce(scale={scale!r}) has no effect on this device; multiply the result instead."
        warn_once(message, stacklevel=user_stacklevel())
    if runtime.is_distributed and runtime.checked:
        verify("reduce", tensor)
    return recursively_apply(partial(_reduce_one, _REDUCTIONS[reduction], runtime.world_size), tensor)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Pad every tensor along `dim` to the largest size that any process has.

    A tensor without that dimension is returned unchanged, and a nested tensor too, with a warning.

    Args:
        pad_index: the value to pad with.
        pad_first: pad at the start instead of the end.

    Raises:
        WrongTypeError: for a leaf that is not a tensor.
    """
    runtime = current.runtime()
    _require_tensors("pad_across_processes", tensor)
    if any(leaf.is_nested for _, leaf in leaves(tensor)):
        warnings.warn(
            "pad_across_processes was given a nested tensor and returns it unchanged; pass "
            "`torch.nested.to_padded_tensor(tensor, 0)` to pad it.",
            CannotPadNestedTensorWarning,
            stacklevel=user_stacklevel(),
        )
    if not runtime.is_distributed:
        return tensor
    if runtime.checked:
        verify("pad_across_processes", tensor, facts=("number of dimensions", "dtype"))
    sizes = [_size_along(leaf, dim) for _, leaf in leaves(tensor)]
    of_all_ranks = communicator().gather_object(sizes)
    if len({len(of_rank) for of_rank in of_all_ranks}) > 1:
        raise DistributedOperationException(
            f"pad_across_processes was given {[len(of_rank) for of_rank in of_all_ranks]} tensors on ranks 0, 1, ..., "
            "and tensors are padded to one another pair by pair; pass structures that are built alike"
        )
    targets = iter([max(column) for column in zip(*of_all_ranks, strict=True)])
    return recursively_apply(lambda leaf: _padded(leaf, dim, next(targets), pad_index, pad_first), tensor)


def gather_tensor_shape(tensor: Tensor | None) -> tuple[Tensor, int]:
    """Return the shape, and the code in `TENSOR_TYPE_TO_INT`, of the tensor that one process has and others lack."""
    information, _ = _shared_information(tensor)
    return torch.tensor(information.shape, dtype=torch.int64), TENSOR_TYPE_TO_INT[information.dtype]


def copy_tensor_to_devices(tensor: Tensor | None = None) -> Tensor:
    """Give every process, on its device, a copy of the tensor that one of them passes; the others pass None."""
    information, source = _shared_information(tensor)
    device = current.runtime().device
    if tensor is None:
        tensor = torch.empty(information.shape, dtype=information.dtype, device=device)
    return communicator().broadcast(cast(Tensor, send_to_device(tensor, device)), source)


@contextmanager
def GatheredParameters(  # noqa: N802 - a public name of long standing
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Make whole, while the context lasts, the parameters that DeepSpeed ZeRO-3 has split; leave others alone."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    # ZeRO-3 marks each parameter it splits with this attribute.
    if not enabled or not any(hasattr(parameter, "ds_id") for parameter in listed):
        yield
        return
    deepspeed = require("deepspeed", why="Gathering parameters that ZeRO-3 has split", extra="deepspeed")
    with deepspeed.zero.GatheredParameters(listed, modifier_rank=modifier_rank, fwd_module=fwd_module):
        yield


class _OwnShare(torch.autograd.Function):
    """Carry a reduced value forward and the gradient of this process's own share back."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, reduced: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return reduced.view_as(reduced)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None, None


def _reduce_one(op: ReduceOp, world_size: int, tensor: Tensor) -> Tensor:
    reduced = communicator().reduce(tensor, op)
    if world_size > 1 and tensor.requires_grad and torch.is_grad_enabled():
        return cast(Tensor, _OwnShare.apply(tensor, reduced, 1 / world_size if op == "mean" else 1.0))  # type: ignore[no-untyped-call]
    return reduced


def _require_tensors(operation: str, data: Any) -> None:
    if isinstance(data, Tensor):
        return
    for path, leaf in leaves(data):
        if not isinstance(leaf, Tensor):
            raise WrongTypeError(
                f"{operation} was given {leaf!r} of type {type(leaf)!r}{' at ' + path if path else ''}, and only "
                "tensors are exchanged element by element; pass tensors, or use `gather_object` (or "
                "`broadcast_object_list`) for other objects"
            )


def _require_rank(operation: str, rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            f"{operation} was given from_process={rank!r}, and this run has processes 0 to {world_size - 1}; name one "
            "of these"
        )


def _size_along(tensor: Tensor, dim: int) -> int:
    return -1 if tensor.is_nested or not -tensor.dim() <= dim < tensor.dim() else tensor.shape[dim]


def _padded(tensor: Tensor, dim: int, size: int, value: int, first: bool) -> Tensor:
    own = _size_along(tensor, dim)
    if own in (-1, size):
        return tensor
    shape = list(tensor.shape)
    shape[dim] = size
    result = tensor.new_full(shape, value)
    result.narrow(dim, size - own if first else 0, own).copy_(tensor)
    return result


def _shared_information(tensor: Tensor | None) -> tuple[TensorInformation, int]:
    """Return what describes the tensor that one rank has, and that rank."""
    own = None if tensor is None else TensorInformation(tensor.shape, tensor.dtype)
    of_all_ranks = communicator().gather_object(own)
    for rank, information in enumerate(of_all_ranks):
        if information is not None:
            return information, rank
    raise UsageError(
        "every process passed None where one of them has to pass the tensor that all shall have; pass it on that process"
    )
