"""The check that a run goes on from its checkpoint as if it had never stopped."""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.collectives.ops import broadcast_object_list, gather_object
from accelerate.collectives.rng import set_seed
from accelerate.test_utils.self_check import CheckFailure, Noticeboard, expect, expect_close

FEATURES = 4
BATCH = 4
BATCHES = 6
_DONE = 2  # batches of the second epoch that are behind when the state is saved


@dataclass
class Tally:
    """An object of the user's that is saved with the rest."""

    count: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return what is saved."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what was saved."""
        self.count = state["count"]


class TrainedRun:
    """A small training whose every value can be compared."""

    def __init__(self, accelerator: Accelerator) -> None:
        set_seed(11)
        samples = BATCHES * BATCH * accelerator.num_processes
        inputs = torch.randn(samples, FEATURES)
        data = TensorDataset(torch.arange(samples), inputs, inputs.sin().sum(dim=1, keepdim=True))
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * accelerator.num_processes, gamma=0.9)
        self.accelerator = accelerator
        self.model, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
            model, optimizer, scheduler, DataLoader(data, batch_size=BATCH, shuffle=True)
        )
        self.tally = Tally()
        accelerator.register_for_checkpointing(self.tally)

    def train(self, batches: Iterator[Any], limit: int | None = None) -> list[int]:
        """Train on batches, and return the numbers of the samples that were in them on this process."""
        seen: list[int] = []
        while limit is None or limit > 0:
            batch = next(batches, None)
            if batch is None:
                break
            numbers, inputs, targets = batch
            self.accelerator.backward(torch.nn.functional.mse_loss(self.model(inputs), targets))
            self.optimizer.step()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="This schedule advances")
                self.scheduler.step()
            self.optimizer.zero_grad()
            self.tally.count += 1
            seen += numbers.tolist()
            limit = None if limit is None else limit - 1
        return seen

    def state(self) -> dict[str, Any]:
        """Return a copy of everything that a checkpoint restores, by name."""
        weights = {f"weight {name}": value for name, value in self.model.state_dict().items()}
        moments = {
            f"optimizer {name} of parameter {index}": value
            for index, entry in self.optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }
        found = {name: value.detach().clone() for name, value in {**weights, **moments}.items()}
        return {
            **found,
            "learning rate": self.scheduler.get_last_lr(),
            "registered object": self.tally.count,
            "progress": self.accelerator.progress.state_dict(),
            "position of the loader": self.loader.position,
            "torch generator": torch.get_rng_state(),
        }

    def spoil(self) -> None:
        """Change everything that a checkpoint restores."""
        self.train(iter(self.loader))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(7.0)
        self.tally.count = -1
        torch.manual_seed(self.accelerator.process_index)


def check_checkpoint(accelerator: Accelerator, board: Noticeboard) -> None:
    """Save in the middle of an epoch, change everything, load, and go on as the run that was never stopped.

    Args:
        accelerator: One with a sampler that can be seeded, and full precision.
    """
    with _folder_of_all(board) as folder:
        if folder is None:
            return
        run = TrainedRun(accelerator)
        run.train(iter(run.loader))
        batches = iter(run.loader)
        run.train(batches, limit=_DONE)
        accelerator.save_state(folder / "checkpoint")
        saved = run.state()
        rest, after = run.train(batches), run.train(iter(run.loader))
        final = run.state()

        run.spoil()
        accelerator.load_state(folder / "checkpoint")
        _compare(run.state(), saved, "after loading")
        expect(run.train(iter(run.loader)), rest, "the rest of the epoch after loading")
        expect(run.train(iter(run.loader)), after, "the epoch after that")
        _compare(run.state(), final, "at the end", tolerance=1e-6)
        accelerator.wait_for_everyone()  # the folder goes when all have read it


def _compare(found: dict[str, Any], wanted: dict[str, Any], when: str, tolerance: float = 0.0) -> None:
    expect(sorted(found), sorted(wanted), f"the parts of the state {when}")
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            expect_close(found[name], value, f"{name} {when}", tolerance)
        elif isinstance(value, torch.Tensor):
            if not torch.equal(found[name], value):
                raise CheckFailure(f"{name} {when} is not what it was")
        else:
            expect(found[name], value, f"{name} {when}")


@contextmanager
def _folder_of_all(board: Noticeboard) -> Iterator[Path | None]:
    """Make a folder that all processes see, None where machines share neither of the usual places."""
    for place in (None, Path.cwd()):
        made = [tempfile.mkdtemp(prefix="accelerate-test-", dir=place) if board.rank == 0 else ""]
        folder = Path(str(broadcast_object_list(made)[0]))
        try:
            if all(gather_object([folder.is_dir()])):
                yield folder
                return
        finally:
            if board.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    if board.rank == 0:
        sys.stderr.write(
            "The machines share neither the folder for temporary files nor the current one, so no checkpoint was tried. "
            "Run the check from a folder that all of them see.\n"
        )
    yield None
