"""How far the run has come, when it is to stop, and how it goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from accelerate._base.constants import PREEMPTED_EXIT_CODE
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.collectives import communicator
from accelerate.config import env
from accelerate.config.plugins.training import ProjectConfiguration
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import Progress
from accelerate.watch.preemption import Preemption, ignore_signals

_LOG = logging.getLogger(__name__)


class ProgressMixin:
    """Count, stop and resume, the same on all processes."""

    project_configuration: ProjectConfiguration
    _optimizers: list[AcceleratedOptimizer]
    _progress: Progress
    _preemption: Preemption | None = None
    _reads = 0

    @property
    def progress(self) -> Progress:
        """Return how far the run has come: `epoch`, `step` (optimizer updates) and `samples` of all processes.

        It is saved and restored with the checkpoints of the run.
        """
        return self._progress

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs that are left of `total`, from the one in which the run stands.

        That is the first in a new run. After `load_state` it is the epoch of the checkpoint, or the one after it if the
        checkpoint was taken with the last batch of an epoch or later. If the launcher was told `--auto_resume`, or
        Slurm has requeued the job, the newest valid checkpoint is loaded first, unless one was loaded already.

        Example:
            ```python
            for epoch in accelerator.epochs(10):
                for batch in loader:
                    ...
            ```
        """
        if not self._progress.was_restored and self._progress.step == 0 and _resumes_by_itself():
            self._resume_if_possible()
        while self._progress.epoch < total:
            yield self._progress.epoch
            self._progress.epoch += 1

    @property
    def should_stop(self) -> bool:
        """Return whether the run is to stop here because a process got SIGTERM or SIGUSR1.

        All processes get the same answer at the same step (`progress.step`), whichever of them got the signal: True at
        one step and from there on. Without a prepared optimizer there are no steps, and every process must read it
        equally often. Reading it costs no communication. From the first time on, the signals no longer end the process.

        Example:
            ```python
            if accelerator.should_stop:
                accelerator.save_state()
                accelerator.exit_for_restart()
            ```
        """
        preemption = self._preemption
        if preemption is None:
            preemption = self._preemption = Preemption()
        return preemption.is_reached(self._clock())

    def check_stop(self) -> bool:
        """Return at once, on all processes, whether any of them got a signal; every process must call it.

        It communicates, and is for places where no optimizer steps: the batches of a long evaluation. Once it has
        returned True, `should_stop` is True everywhere.
        """
        if self._preemption is None:
            self._preemption = Preemption()
        wish = torch.tensor([float(self._preemption.wants_to_stop)], device=current.runtime().device)
        stops = bool(communicator().reduce(wish, "max").item() > 0)
        if stops:
            self._preemption.stop_at(0)
        return stops

    def _clock(self) -> int:
        if self._optimizers:
            return self._progress.step
        self._reads += 1
        return self._reads

    def exit_for_restart(self) -> NoReturn:
        """End this process with exit code 75, which says that the run goes on when it is started again.

        Every process must call it. It waits for a save that is under way, closes trackers and leaves the process group.
        `accelerate launch` ends with the same code.
        """
        accelerator: Any = self
        accelerator.wait_for_save()
        accelerator.end_training()
        # Who asked this process to end need not do so again while it does.
        ignore_signals()
        raise SystemExit(PREEMPTED_EXIT_CODE)

    def resume(self) -> bool:
        """Go on from the newest valid checkpoint of the project folder; call it once everything is prepared.

        Returns:
            Whether there was one.

        Raises:
            ConfigurationError: If the Accelerator has no `project_dir`.
            CheckpointError: If there is one and it does not fit this run.

        Example:
            ```python
            accelerator = Accelerator(project_dir="runs/first")
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            accelerator.resume()
            for epoch in accelerator.epochs(10):
                ...
            ```
        """
        folder = self.project_configuration.project_dir
        if folder is None:
            raise ConfigurationError(
                "resume() was called and project_dir is None, so it is unknown where the checkpoints are. Write "
                "Accelerator(project_dir=...), or load one by its path with load_state(...)."
            )
        from accelerate.checkpointing.catalog import newest_valid

        found: list[tuple[bool, str]] = [(False, "")]
        if current.runtime().rank == 0:
            choice = newest_valid(folder)
            found[0] = (choice.value is not None, choice.reason)
        communicator().broadcast_objects(found)
        exists, reason = found[0]
        if exists:
            accelerator: Any = self
            accelerator.load_state()
        elif current.runtime().rank == 0:
            _LOG.info("The run starts from the beginning: %s.", reason)
        return exists

    def _resume_if_possible(self) -> None:
        if self.project_configuration.project_dir is not None:
            self.resume()
            return
        warn_once(
            "This run was to go on from its newest checkpoint, and project_dir is None, so it is unknown where that is: "
            "it starts from the beginning. Write Accelerator(project_dir=...)."
        )

    def _stop_listening(self) -> None:
        if self._preemption is None:
            return
        self._preemption.close()
        # Without its group a process cannot agree on anything any more; its last answer stays.
        if not current.runtime().is_distributed:
            self._preemption = None


def _resumes_by_itself() -> bool:
    """Return whether this is a run that shall go on: one started with `--auto_resume`, or a job that Slurm requeued."""
    return env.flag("ACCELERATE_AUTO_RESUME", default=env.integer("SLURM_RESTART_COUNT", 0) > 0)
