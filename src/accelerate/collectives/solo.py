"""The communicator of a run with one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelerate.collectives.base import ReduceOp


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
