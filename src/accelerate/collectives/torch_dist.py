"""The communicator over torch.distributed (gloo, nccl and the vendors' own backends)."""

from __future__ import annotations

import math
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate._base.errors import UsageError, WrongTypeError
from accelerate.collectives.base import ReduceOp
from accelerate.runtime import process_group

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Torch 2.13 renamed the function, and warns under the old name.
_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# The dtypes that every backend reduces natively and without loss; the others travel as a wider one.
_REDUCIBLE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# A shape header holds this many dimensions; a tensor with more costs one further exchange.
_HEADER_DIMS = 8
_MAX_DIMS = 64
# Objects that pickle to fewer bytes travel together with their length, in one exchange.
_INLINE_BYTES = 2040
_NOT_PICKLABLE = -1
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class TorchDistCommunicator:
    """Exchange values over a process group.

    A tensor on a device that the group cannot reach is moved for the exchange; the result is on the device of the
    tensor that was given. Tensors travel as bytes, so every dtype is gathered and broadcast exactly.

    Args:
        group: the process group; the default one if None.
        device: this process's device, used where the group cannot exchange what is in host memory.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        if not dist.is_initialized():
            raise UsageError(
                "a TorchDistCommunicator was built while torch.distributed has no process group, so there is nobody "
                "to talk to; create an `Accelerator()` or call `torch.distributed.init_process_group` first"
            )
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        reachable = process_group.reachable_devices(group)
        self._host = torch.device("cpu") if "cpu" in reachable else None
        own = device if device is not None and device.type in reachable else self._host
        self._device: torch.device = own or torch.device(torch.accelerator.current_accelerator() or "cpu")
        self._reachable = reachable
        self._gathers_flat = True

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def gather(self, tensor: Tensor) -> Tensor:
        rows = (1,) if tensor.dim() == 0 else tensor.shape
        parts = self._exchange(self._to_bytes(tensor))
        shape = (rows[0] * self._world_size, *rows[1:])
        result = parts.view(-1).view(tensor.dtype).view(shape)
        return result if result.device == tensor.device else result.to(tensor.device)

    def gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        own = self._to_bytes(tensor)
        specs = self._exchange_specs(tensor)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in specs]
        rows = self._exchange_padded(own, sizes).to(tensor.device)
        # Clones, so that one kept tensor does not hold the memory of all ranks, and every view is aligned.
        parts = [row[:size].clone() for row, size in zip(rows, sizes, strict=True)]
        return [part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, specs, strict=True)]

    def reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        _check_dense(tensor)
        if tensor.is_complex():
            return self._reduce_complex(tensor, op)
        if tensor.dtype == torch.uint64 and op in ("max", "min"):
            raise WrongTypeError(
                f"reduce(op={op!r}) was given a tensor of {tensor.dtype}, which no backend can order; "
                "convert it first, for example with `.to(torch.int64)`"
            )
        dtype, result_dtype = reduction_dtypes(tensor, op)
        wire = torch.empty(tensor.shape, dtype=dtype, device=self._wire_device(tensor.device))
        wire.copy_(tensor.detach())
        dist.all_reduce(wire, _OPS[op], group=self._group)
        if op == "mean":
            wire = wire / self._world_size
        return wire.to(device=tensor.device, dtype=result_dtype)

    def average(self, tensors: list[Tensor]) -> None:
        """Replace tensors of one dtype by their means over all ranks, in one exchange."""
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        wire = flat.to(self._wire_device(flat.device))
        dist.all_reduce(wire, group=self._group)
        wire /= self._world_size
        parts = wire.to(flat.device).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        wire = self._to_bytes(tensor)
        dist.broadcast(wire, self._global_rank(source), group=self._group)
        own = tensor.detach()
        if self._rank != source and wire.data_ptr() != own.data_ptr():
            own.copy_(wire.view(tensor.dtype).view(tensor.shape))
        return tensor

    def gather_object(self, value: object) -> list[Any]:
        payload, length, error = _pickled(value)
        heads = self._exchange(self._head(payload, length)).to("cpu")
        lengths = [int(head[:8].view(torch.int64)) for head in heads.unbind()]
        _check_pickled(dict(enumerate(lengths)), error)
        bodies = [head[8:] for head in heads.unbind()]
        if max(lengths) > _INLINE_BYTES:
            own = payload[:length].to(self._head_device)
            bodies = list(self._exchange_padded(own, lengths).to("cpu").unbind())
        return [_unpickled(body, length) for body, length in zip(bodies, lengths, strict=True)]

    def broadcast_objects(self, values: list[Any], source: int = 0) -> None:
        is_source = self._rank == source
        payload, length, error = _pickled(list(values)) if is_source else (_NO_BYTES, 0, None)
        head = self._head(payload, length)
        dist.broadcast(head, self._global_rank(source), group=self._group)
        head = head.to("cpu")
        length = int(head[:8].view(torch.int64))
        _check_pickled({source: length}, error)
        body = head[8:]
        if length > _INLINE_BYTES:
            body = payload.to(self._head_device) if is_source else self._empty_bytes(length)
            dist.broadcast(body, self._global_rank(source), group=self._group)
        if not is_source:
            values[:] = _unpickled(body.to("cpu"), length)

    def barrier(self) -> None:
        # A device collective must be told its device, or torch guesses one by rank and warns.
        index = None if self._host is not None else self._device.index
        dist.barrier(group=self._group, device_ids=None if index is None else [index])

    @property
    def _head_device(self) -> torch.device:
        """The device for headers and objects: host memory if the group reaches it, no synchronisation is needed."""
        return self._host or self._device

    def _global_rank(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _wire_device(self, device: torch.device) -> torch.device:
        if device in (self._host, self._device):
            return device
        # A group that spans vendors' devices (gloo) takes any of them; nccl takes this rank's own only.
        return device if device.type in self._reachable and device.type != self._device.type else self._device

    def _to_bytes(self, tensor: Tensor) -> Tensor:
        _check_dense(tensor)
        plain = tensor.detach()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        wire = self._wire_device(plain.device)
        if plain.device != wire:
            plain = plain.to(wire)
        return plain.contiguous().view(-1).view(torch.uint8)

    def _empty_bytes(self, length: int) -> Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self._head_device)

    def _exchange(self, own: Tensor) -> Tensor:
        """All-gather vectors of one length; return them as rows."""
        rows = torch.empty((self._world_size, own.numel()), dtype=own.dtype, device=own.device)
        if own.numel() == 0:
            return rows
        if self._gathers_flat:
            try:
                _gather_flat(rows.view(-1), own, group=self._group)
                return rows
            except RuntimeError as error:
                if "does not support" not in str(error) and "not implemented" not in str(error):
                    raise
                self._gathers_flat = False
        dist.all_gather(list(rows.unbind()), own, group=self._group)
        return rows

    def _exchange_padded(self, own: Tensor, sizes: list[int]) -> Tensor:
        """All-gather vectors of the given lengths; return rows of the largest length."""
        widest = max(sizes)
        if own.numel() < widest:
            padded = torch.zeros(widest, dtype=own.dtype, device=own.device)
            padded[: own.numel()] = own
            own = padded
        return self._exchange(own)

    def _exchange_specs(self, tensor: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of every rank's tensor."""
        dims = list(tensor.shape[:_HEADER_DIMS])
        dims += [0] * (_HEADER_DIMS - len(dims))
        header = torch.tensor([tensor.dim(), _DTYPE_CODES[tensor.dtype], *dims], device=self._head_device)
        heads = self._exchange(header).tolist()
        tails: list[list[int]] = [[]] * len(heads)
        if any(head[0] > _HEADER_DIMS for head in heads):
            rest = list(tensor.shape[_HEADER_DIMS:])
            rest += [0] * (_MAX_DIMS - len(rest))
            tails = self._exchange(torch.tensor(rest, device=self._head_device)).tolist()
        return [
            (tuple([*head[2:], *tail][: head[0]]), _DTYPES[head[1]]) for head, tail in zip(heads, tails, strict=True)
        ]

    def _reduce_complex(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        if op in ("max", "min"):
            raise WrongTypeError(
                f"reduce(op={op!r}) was given a tensor of {tensor.dtype}, and complex numbers have no order; "
                "reduce its `.abs()`, or use op='sum' or op='mean'"
            )
        parts = self.reduce(torch.view_as_real(tensor.detach().resolve_conj()), op)
        return torch.view_as_complex(parts.contiguous())

    def _head(self, payload: Tensor, length: int) -> Tensor:
        head = torch.zeros(8 + _INLINE_BYTES, dtype=torch.uint8)
        head[:8].view(torch.int64)[0] = length
        if 0 < length <= _INLINE_BYTES:
            head[8 : 8 + length] = payload
        return head.to(self._head_device)


def _check_dense(tensor: Tensor) -> None:
    if type(tensor) is not Tensor and hasattr(tensor, "full_tensor"):
        raise WrongTypeError(
            f"a collective was given a DTensor with placements {getattr(tensor, 'placements', None)!r}, which is "
            "already spread over processes; pass `tensor.full_tensor()` or `tensor.to_local()`"
        )
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        raise WrongTypeError(
            f"a collective was given a tensor of layout {tensor.layout!r} (nested: {tensor.is_nested}, quantized: "
            f"{tensor.is_quantized}), and only dense tensors can be exchanged; pass `tensor.to_dense()`, or use "
            "`gather_object`"
        )
    if tensor.device.type == "meta":
        raise WrongTypeError(
            f"a collective was given a tensor of shape {tuple(tensor.shape)} on the meta device, which has no values "
            "to exchange; load or initialise it first"
        )


def reduction_dtypes(tensor: Tensor, op: ReduceOp) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype to reduce in and that of the result."""
    if tensor.is_floating_point():
        return (tensor.dtype if tensor.dtype in _REDUCIBLE else torch.float32), tensor.dtype
    if op == "mean":
        return torch.int64, torch.get_default_dtype()
    # torch.sum counts the true entries of a bool tensor; so does a sum over ranks.
    result = torch.int64 if op == "sum" and tensor.dtype == torch.bool else tensor.dtype
    return (tensor.dtype if tensor.dtype in _REDUCIBLE else torch.int64), result


def _pickled(value: object) -> tuple[Tensor, int, Exception | None]:
    """Return the pickled value, its length, and why it could not be pickled, the length then being below zero."""
    try:
        data = pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - a class decides itself what its pickling raises
        # The other ranks are about to exchange: this one takes part, and all of them raise afterwards.
        return _NO_BYTES, _NOT_PICKLABLE, error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), len(data), None


def _check_pickled(lengths: dict[int, int], error: Exception | None) -> None:
    """Raise on every rank when one could not pickle its value, so that nobody waits for it."""
    failed = [rank for rank, length in lengths.items() if length < 0]
    if failed:
        raise WrongTypeError(
            f"the object given on rank(s) {failed} cannot be pickled, and only pickled objects travel between "
            "processes (the traceback of those ranks names it); send plain data instead"
        ) from error


def _unpickled(body: Tensor, length: int) -> Any:
    return pickle.loads(body[:length].numpy().tobytes())
