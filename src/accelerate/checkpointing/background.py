"""A save that goes on while training does."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from accelerate.collectives import Communicator, SoloCommunicator, TorchDistCommunicator
from accelerate.runtime import current

_LOG = logging.getLogger(__name__)


class PendingSave:
    """A checkpoint that is being written.

    The thread is not a daemon: a program that ends meanwhile waits for its last checkpoint.

    Args:
        target: The folder of the checkpoint.
        work: Writes and publishes it.
    """

    def __init__(self, target: Path, work: Callable[[], None]) -> None:
        self.target = target
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="accelerate-save")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the program waits
            self._error = error
            # Said now as well, because a program may end without waiting.
            _LOG.error("%s", error)

    def done(self) -> bool:
        """Return whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the end and return the folder of the checkpoint.

        Raises:
            CheckpointError: If it could not be saved.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.target


def background_communicator() -> Communicator:
    """Return how saving threads of the ranks talk: over a group of their own, beside the one that training uses."""
    return current.remember("checkpoint communicator", _make)


def _make() -> Communicator:
    if not current.runtime().is_distributed:
        return SoloCommunicator()
    return TorchDistCommunicator(dist.new_group(backend="gloo"))
