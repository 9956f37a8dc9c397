"""How the processes of a run exchange tensors and objects: the interface, its choice, and a run with one process."""

from __future__ import annotations

from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from accelerate.runtime import current

ReduceOp = Literal["sum", "mean", "max", "min"]


@runtime_checkable
class Communicator(Protocol):
    """Exchange values between `world_size` processes; every method is called by all of them."""

    @property
    def rank(self) -> int:
        """The position of this process."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks, equal in shape, on dimension 0; a 0-d tensor counts as one row."""

    def gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        """Return one tensor a rank; shapes may differ, dtype and number of dimensions may not."""

    def reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        """Return a new tensor that combines those of all ranks; the mean of integers is a float."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite the tensor with that of the source and return it."""

    def gather_object(self, value: object) -> list[Any]:
        """Return the picklable values of all ranks, one entry a rank."""

    def broadcast_objects(self, values: list[Any], source: int = 0) -> None:
        """Overwrite the entries of the list with those of the source; all lists have one length."""

    def barrier(self) -> None:
        """Wait until every process is here."""


class SoloCommunicator:
    """Answer every exchange with the process's own value, in the shape and dtype a group would give."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(1) if tensor.dim() == 0 else tensor

    def gather_uneven(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def reduce(self, tensor: Tensor, op: ReduceOp) -> Tensor:
        if op == "sum" and tensor.dtype == torch.bool:
            return tensor.to(torch.int64)
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor.to(torch.get_default_dtype())
        return tensor.clone()

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def gather_object(self, value: object) -> list[Any]:
        return [value]

    def broadcast_objects(self, values: list[Any], source: int = 0) -> None:
        return None

    def barrier(self) -> None:
        return None


def communicator() -> Communicator:
    """Return the communicator of the running program: one process talks to itself, several over their group."""
    return current.remember("communicator", _choose)


def _choose() -> Communicator:
    runtime = current.runtime()
    if not runtime.is_distributed:
        return SoloCommunicator()
    if runtime.backend.records_operations:
        from accelerate.collectives.xla import choose_communicator

        return choose_communicator(runtime)
    from accelerate.collectives.torch_dist import TorchDistCommunicator  # it takes its types from here

    return TorchDistCommunicator(device=runtime.device)
