"""A small task for XLA devices, its loop by hand, and the count of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator

FEATURES, CLASSES, BATCH = 8, 3, 20
SAMPLES = 240


@dataclass(frozen=True)
class Task:
    """What is trained; another `hidden` is another graph."""

    hidden: int = 16
    accumulation: int = 1
    clip: float | None = 1.0
    steps: int = 50
    mixed_precision: str = "no"
    batch: int = BATCH

    def model(self) -> torch.nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return torch.nn.Sequential(
                torch.nn.Linear(FEATURES, self.hidden), torch.nn.ReLU(), torch.nn.Linear(self.hidden, CLASSES)
            )

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))

    def data(self, samples: int = SAMPLES) -> TensorDataset:
        inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 1).long())

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(self.data(), batch_size=self.batch, **options)


def losses_by_hand(task: Task, device: Any = "cpu", end_step: Callable[[], None] = lambda: None) -> list[float]:
    """Train as a program without the library does."""
    model = task.model().to(device)
    optimizer = task.optimizer(model)
    scheduler = task.scheduler(optimizer)
    losses: list[torch.Tensor] = []
    for number, (inputs, targets) in enumerate(_endless(task.loader()), 1):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=task.mixed_precision == "bf16"):
            outputs = model(inputs.to(device))
        loss = torch.nn.functional.cross_entropy(outputs.float(), targets.to(device))
        (loss / task.accumulation if task.accumulation > 1 else loss).backward()
        if number % task.accumulation == 0:
            if task.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        end_step()
        if number == task.steps:
            break
    return [float(loss) for loss in losses]


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def losses_of(task: Task, accelerator: Accelerator, **loader_options: Any) -> list[float]:
    """Train as a program with the library does."""
    model = task.model()
    optimizer = task.optimizer(model)
    objects = accelerator.prepare(model, optimizer, task.scheduler(optimizer), task.loader(**loader_options))
    return run(task, accelerator, *objects)


def run(task: Task, accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> list[float]:
    """Train prepared objects."""
    losses: list[torch.Tensor] = []
    while len(losses) < task.steps:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if task.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), task.clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) == task.steps:
                break
    return [float(loss) for loss in losses]


@dataclass
class Compilations:
    """How many graphs were compiled inside of a block."""

    count: int = 0


@contextmanager
def compilations() -> Iterator[Compilations]:
    import torch_xla
    import torch_xla.debug.metrics as metrics

    torch_xla.sync(wait=True)
    before = metrics.counter_value("UncachedCompile") or 0
    found = Compilations()
    yield found
    torch_xla.sync(wait=True)
    found.count = (metrics.counter_value("UncachedCompile") or 0) - before


def largest_difference(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected)
    return max(abs(one - other) for one, other in zip(found, expected, strict=True))
