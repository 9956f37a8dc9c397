"""How a run goes through its epochs, stops when it is asked to, and goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from accelerate._base.helpers import warn_once
from accelerate.config import env
from accelerate.runtime.gradient_clock import Progress
from accelerate.session.checkpoints import RunCheckpoints
from accelerate.session.prepared import PreparedObjects
from accelerate.session.setup import Run
from accelerate.watch.preemption import Preemption


@dataclass
class RunProgress:
    """Count, stop and resume, the same on all processes."""

    run: Run
    objects: PreparedObjects
    progress: Progress
    checkpoints: RunCheckpoints
    preemption: Preemption | None = None
    _reads: int = 0

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs that are left of `total`; a run that was started to go on loads its checkpoint first."""
        # One started with `--auto_resume`, or a job that Slurm requeued.
        resumes = env.flag("ACCELERATE_AUTO_RESUME", default=env.integer("SLURM_RESTART_COUNT", 0) > 0)
        if resumes and not self.progress.was_restored and self.progress.step == 0:
            if self.run.options.project_configuration.project_dir is not None:
                self.checkpoints.resume()
            else:
                warn_once(
                    "This run was to go on from its newest checkpoint, and project_dir is None, so it is unknown where "
                    "that is: it starts from the beginning. Write Accelerator(project_dir=...)."
                )
        while self.progress.epoch < total:
            yield self.progress.epoch
            self.progress.epoch += 1

    def should_stop(self) -> bool:
        """Return whether all processes stop at this step."""
        return self._listen().is_reached(self._current_step())

    def _current_step(self) -> int:
        """Return the optimizer updates so far; where nothing is optimized, how often this was asked."""
        if self.objects.optimizers:
            return self.progress.step
        self._reads += 1
        return self._reads

    def check_stop(self) -> bool:
        """Return at once, on all processes, whether any of them got a signal."""
        preemption = self._listen()
        wish = torch.tensor([float(preemption.wants_to_stop)], device=self.run.runtime.device)
        stops = bool(self.run.communicator.reduce(wish, "max").item() > 0)
        if stops:
            preemption.stop_at(0)
        return stops

    def _listen(self) -> Preemption:
        if self.preemption is None:
            self.preemption = Preemption()
        return self.preemption.start()

    def stop_listening(self) -> None:
        """Let signals end this process again."""
        if self.preemption is None:
            return
        self.preemption.close()
        # Without its group a process cannot agree on anything any more; its last answer stays.
        if not self.run.runtime.is_distributed:
            self.preemption = None
