"""The communicators of XLA devices: tensors on a device travel from device to device, all else over the host's group.

Objects, barriers and tensors in host memory go through a gloo group beside the devices. torch_xla's own rendezvous would
carry objects too, but over the devices: it ends the step that is being recorded, and every new length of an object is a new
graph to compile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelerate.collectives.base import ReduceOp
from accelerate.collectives.torch_dist import TorchDistCommunicator, reduction_dtypes
from accelerate.devices.xla import XLA
from accelerate.runtime.current import Runtime

# Collectives of devices carry these as int32.
_NARROW = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16})
_OPS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min"}


def choose_communicator(runtime: Runtime) -> TorchDistCommunicator:
    """Return how the processes of an XLA run exchange values.

    Processes whose devices do not reach each other, as on the CPU, exchange everything over the host's group.
    """
    if XLA.is_spmd:
        return GlobalTensorCommunicator(device=runtime.device)
    if int(XLA.runtime.world_size()) == runtime.world_size:
        return DeviceCommunicator(device=runtime.device)
    return HostCommunicator(device=runtime.device)


class HostCommunicator(TorchDistCommunicator):
    """Exchange everything over the host's group."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if not _is_on_device(tensor):
            return super().broadcast(tensor, source)
        # The memory of a device is not at hand: the value is copied out and in.
        received = super().broadcast(tensor.detach().cpu(), source)
        if self.rank != source:
            tensor.detach().copy_(received)
        return tensor


class DeviceCommunicator(HostCommunicator):
    """Exchange tensors on devices by torch_xla's collectives, which become part of the step."""

    def gather(self, tensor: Tensor) -> Tensor:
        if not _is_on_device(tensor):
            return super().gather(tensor)
        rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        gathered: Tensor = XLA.model.all_gather(rows.to(torch.int32) if rows.dtype in _NARROW else rows)
        return gathered.to(tensor.dtype)

    def reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        if not _is_on_device(tensor):
            return super().reduce(tensor, op)
        dtype, result_dtype = reduction_dtypes(tensor, op)
        reduced: Tensor = XLA.model.all_reduce(_OPS[op], tensor.detach().to(dtype))
        return (reduced / self.world_size if op == "mean" else reduced).to(result_dtype)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if not _is_on_device(tensor):
            return super().broadcast(tensor, source)
        own = tensor.detach()
        # As data and not as a constant: all ranks must record the same graph. And chosen, not multiplied by 0 as torch_xla's
        # own broadcast does: what the other ranks hold may be no number.
        is_source = torch.tensor(self.rank == source).to(own.device)
        wire = own.to(torch.int32) if own.dtype in _NARROW else own
        chosen = torch.where(is_source, wire, torch.zeros_like(wire))
        own.copy_(XLA.model.all_reduce("sum", chosen).to(own.dtype))
        return tensor

    def average(self, tensors: list[Tensor]) -> None:
        if tensors:
            XLA.model.all_reduce("sum", tensors, scale=1.0 / self.world_size)


class GlobalTensorCommunicator(HostCommunicator):
    """One process on each of several machines, whose devices work together: a tensor on them is one for all."""

    def gather(self, tensor: Tensor) -> Tensor:
        if not _is_on_device(tensor):
            return super().gather(tensor)
        return tensor.reshape(1) if tensor.dim() == 0 else tensor


def _is_on_device(tensor: Tensor) -> bool:
    return tensor.device.type == XLA.type
