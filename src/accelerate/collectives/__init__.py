"""Exchange of tensors and objects between the processes of a run."""

from __future__ import annotations

from accelerate.collectives.base import Communicator, SoloCommunicator
from accelerate.collectives.torch_dist import TorchDistCommunicator
from accelerate.runtime import current

__all__ = ["Communicator", "SoloCommunicator", "TorchDistCommunicator", "communicator"]


def communicator() -> Communicator:
    """Return the communicator of the running program: one process talks to itself, several over their group."""
    return current.remember("communicator", _choose)


def _choose() -> Communicator:
    runtime = current.runtime()
    if runtime.world_size == 1:
        return SoloCommunicator()
    return TorchDistCommunicator(device=runtime.device)
