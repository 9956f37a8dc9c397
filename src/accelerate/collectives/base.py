"""The interface of a communicator: how the processes of a run exchange tensors and objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

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
