"""Trainings small enough for a test: a line through points, and a run whose every value can be compared."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from accelerate.accelerator import Accelerator

_FEATURES = 4
_BATCH = 4
# Batches of an epoch on each process.
_EPOCH = 6


class RegressionDataset:
    """Points near the line `y = a x + b`, as dictionaries of `x` and `y`.

    Args:
        seed: Makes the same points each time.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(np.float32)
        self.y = (a * self.x + b + generator.normal(scale=0.1, size=(length,))).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(torch.nn.Module):
    """A line with two parameters.

    Args:
        a: The slope to start from.
        b: The height at zero to start from.
        double_output: Accepted and not used.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the height of the line at each x."""
        return None if x is None else x * self.a + self.b


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


class SmallRun:
    """A small training whose every value can be compared.

    Args:
        shuffle: Draw the order of the samples and what is dropped out at random.
    """

    def __init__(self, accelerator: Accelerator, *, shuffle: bool) -> None:
        from accelerate.collectives.rng import set_seed

        set_seed(11)
        samples = _EPOCH * _BATCH * accelerator.num_processes
        inputs = torch.randn(samples, _FEATURES)
        data = TensorDataset(torch.arange(samples), inputs, inputs.sin().sum(dim=1, keepdim=True))
        dropout = torch.nn.Dropout(0.2 if shuffle else 0.0)
        model = torch.nn.Sequential(torch.nn.Linear(_FEATURES, 8), dropout, torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * accelerator.num_processes, gamma=0.9)
        self.accelerator = accelerator
        self.model, self.optimizer, self.scheduler, self.loader = accelerator.prepare(
            model, optimizer, scheduler, DataLoader(data, batch_size=_BATCH, shuffle=shuffle)
        )
        self.tally = Tally()
        accelerator.register_for_checkpointing(self.tally)

    def train(self, batches: Iterable[Any] | None = None, limit: int | None = None) -> list[int]:
        """Train on batches, by default an epoch, and return the numbers of their samples on this process."""
        seen: list[int] = []
        for numbers, inputs, targets in islice(self.loader if batches is None else batches, limit):
            self.accelerator.backward(torch.nn.functional.mse_loss(self.model(inputs), targets))
            self.optimizer.step()
            with warnings.catch_warnings():
                # That it advances once for each process is what the step size above counts with.
                warnings.filterwarnings("ignore", message="This schedule advances")
                self.scheduler.step()
            self.optimizer.zero_grad()
            self.tally.count += 1
            seen += numbers.tolist()
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
        self.train()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(7.0)
        self.tally.count = -1
        torch.manual_seed(self.accelerator.process_index)
