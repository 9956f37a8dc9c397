"""The workers that listen for signals: they are given time to save when the run is asked to stop."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.constants import PREEMPTED_FILE
from accelerate.launch import children

if TYPE_CHECKING:
    import psutil


class Listeners:
    """What workers have left in the folder that they were told of.

    Args:
        folder: The folder; it is made here.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def processes(self) -> list[psutil.Process]:
        """Return the workers that listen and still run."""
        told = {entry.name for entry in self.folder.iterdir()}
        return [process for process in children.running() if str(process.pid) in told] if told else []

    @property
    def have_stopped(self) -> bool:
        """Whether workers of the last attempt have ended in order to go on later."""
        return (self.folder / PREEMPTED_FILE).exists()

    def forget_stopped(self) -> None:
        """Begin another attempt."""
        (self.folder / PREEMPTED_FILE).unlink(missing_ok=True)
