"""Runs that are saved on one number of processes and go on on another, many in each group of processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support.training import WEIGHTS, copy_weights, decay, fresh_accelerator, make_data, make_model
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

# torch loads a good part of itself when the first optimizer is made: here, once, and not in every process forked later.
torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())

SAMPLES = 37
COUNTS = (1, 2, 3, 4)
EPOCHS = 3
STEPS_BEFORE_SAVE = 3


def real_samples(loaders: list[Any], steps: int | None = None) -> list[int]:
    """Read some steps on every rank and return what is real of them."""
    seen: list[int] = []
    for loader in loaders:
        for number, batch in enumerate(loader, start=1):
            seen += batch.tolist()[: loader.share.real]
            if number == steps:
                break
    return seen


class RestoredStream(IterableDataset[int]):
    """Numbers from a dataset that saves and restores its position."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.begin = self.reached = 0

    def __iter__(self) -> Iterator[int]:
        self.reached, self.begin = self.begin, 0
        while self.reached < self.length:
            self.reached += 1
            yield self.reached - 1

    def state_dict(self) -> dict[str, int]:
        return {"reached": self.reached}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["reached"]


class Numbers(Dataset[torch.Tensor]):
    """Samples that are their own numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index], dtype=torch.float64)


class NumberStream(IterableDataset[torch.Tensor]):
    """The same without an index; its workers divide it unequally."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        numbers = range(SAMPLES)
        if worker is not None:
            cut = SAMPLES // 4
            numbers = range(cut) if worker.id else range(cut, SAMPLES)
        return (torch.tensor([number], dtype=torch.float64) for number in numbers)


class PlacedStream(IterableDataset[torch.Tensor]):
    """The same, saving its own place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < SAMPLES:
            self.at += 1
            yield torch.tensor([self.at - 1], dtype=torch.float64)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@dataclass(frozen=True)
class Case:
    """How data is read, and in which epoch the run is saved."""

    kind: str
    epoch: int
    workers: int

    @property
    def name(self) -> str:
        return f"{self.kind}-epoch{self.epoch}-workers{self.workers}"

    def prepare(self) -> tuple[Accelerator, Any, Any, Any]:
        """Return an accelerator and what it prepared: model, optimizer, loader."""
        config = DataLoaderConfiguration(
            dispatch_batches="dispatched" in self.kind,
            use_stateful_dataloader="stateful" in self.kind,
            use_seedable_sampler=True,
            data_seed=5,
        )
        accelerator = fresh_accelerator(dataloader_config=config)
        model = torch.nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        loader = DataLoader(self.dataset(), batch_size=2, shuffle=self.shuffles or None, num_workers=self.workers)
        with warnings.catch_warnings():
            # torchdata 0.11 calls something that torch 2.13 deprecates.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            return accelerator, *accelerator.prepare(model, optimizer, loader)

    @property
    def shuffles(self) -> bool:
        return self.kind in ("map", "stateful")

    def dataset(self) -> Any:
        if self.shuffles:
            return Numbers()
        return PlacedStream() if "placed" in self.kind else NumberStream()


CASES = [
    Case(kind, epoch, workers) for kind in ("map", "iterable", "dispatched") for epoch in (0, 1) for workers in (0, 2)
]
CASES += [
    Case(kind, epoch, 0)
    for kind in ("placed", "placed dispatched", "stateful", "stateful dispatched")
    for epoch in (0, 1)
]
Seen = dict[int, list[list[int]]]
"""The real samples of this rank in each step of each epoch."""


def run(
    case: Case, prepared: tuple[Accelerator, Any, Any, Any], last_epoch: int, stop_after: int | None = None
) -> Seen:
    """Train from where the run stands; stop after some steps of its last epoch, or at its end."""
    accelerator, model, optimizer, loader = prepared
    seen: Seen = {}
    for epoch in accelerator.epochs(last_epoch + 1):
        steps = seen.setdefault(epoch, [])
        for batch in loader:
            steps.append([int(number) for number in batch[: loader.share.real, 0]])
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if epoch == last_epoch and len(steps) == stop_after:
                return seen
    return seen


def save_all(folder: str) -> dict[str, Seen]:
    """Train each case and each training for a while and save it."""
    for training in TRAININGS:
        train(training, f"{folder}/{training.name}", resumes=False, micro_batches=training.stops_after)
    results = {}
    for case in CASES:
        prepared = case.prepare()
        results[case.name] = run(case, prepared, case.epoch, STEPS_BEFORE_SAVE)
        prepared[0].save_state(Path(folder, case.name))
    return results


def finish_all(folders: tuple[str, ...]) -> list[dict[str, Any]]:
    """Take up each case of each folder, finish the epoch, and train another one; finish each training."""
    results = []
    for folder in folders:
        found: dict[str, Any] = {
            training.name: train(training, f"{folder}/{training.name}", resumes=True) for training in TRAININGS
        }
        for case in CASES:
            prepared = case.prepare()
            prepared[0].load_state(Path(folder, case.name))
            # The epoch after the resumed one costs new workers: once for each kind is enough.
            further = case.epoch + 1 if case.workers == 0 or case.epoch == 0 else case.epoch
            found[case.name] = run(case, prepared, further)
        results.append(found)
    return results


def merged(ranks: list[Seen], epoch: int) -> list[int]:
    """Return the samples of an epoch in the order of steps, and of ranks in each step."""
    steps = max(len(rank.get(epoch, [])) for rank in ranks)
    return [
        number
        for step in range(steps)
        for rank in ranks
        if step < len(rank.get(epoch, []))
        for number in rank[epoch][step]
    ]


@dataclass(frozen=True)
class Training:
    """A run of `global_batch_size` whose curve must not depend on the number of processes."""

    streams: bool = False
    stops_after: int = 11
    samples: int = 45
    step_samples: int = 12
    epochs: int = 3

    @property
    def name(self) -> str:
        return f"{'stream' if self.streams else 'map'}-stopped-after-{self.stops_after}"

    def prepare(self) -> tuple[Accelerator, Any, Any, Any, Any]:
        accelerator = fresh_accelerator(
            global_batch_size=self.step_samples,
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5),
        )
        model, data = make_model(), make_data(self.samples)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        if self.streams:
            loader: Any = DataLoader(RowStream(data), batch_size=2)
        else:
            loader = DataLoader(data, batch_size=2, shuffle=True)
        return accelerator, *accelerator.prepare(model, optimizer, schedule, loader)


# After 11 micro-batches a window is open on 1, 2, 3 and 4 processes; after 12 none is, and on 2 an epoch has ended.
TRAININGS = [Training(), Training(stops_after=12), Training(streams=True)]


class RowStream(PlacedStream):
    """The rows of a dataset, which save their own place."""

    def __init__(self, data: Dataset[Any]) -> None:
        super().__init__()
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.data):  # type: ignore[arg-type]
            self.at += 1
            yield self.data[self.at - 1]
        self.at = 0


@dataclass
class Curve:
    """What a run leaves: the loss and rate of each update, and the weights."""

    losses: list[float]
    rates: list[float]
    weights: WEIGHTS


def train(training: Training, folder: str | None, resumes: bool, micro_batches: int | None = None) -> Curve:
    """Train from where the run stands to its end, or for some micro-batches, and save it then."""
    accelerator, model, optimizer, schedule, loader = training.prepare()
    if resumes:
        assert folder is not None
        accelerator.load_state(folder)
    losses, rates, seen, done = [], [], [], 0
    for _ in accelerator.epochs(training.epochs):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                rows = torch.nn.functional.mse_loss(model(inputs), targets, reduction="none")
                accelerator.backward(rows.mean())
                seen.append(accelerator.gather_for_metrics(rows.detach()))
                if accelerator.sync_gradients:
                    losses.append(torch.cat(seen).mean().item())
                    rates.append(schedule.get_last_lr()[0])
                    seen.clear()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done += 1
            if done == micro_batches:
                assert folder is not None
                accelerator.save_state(folder)
                return Curve(losses, rates, copy_weights(accelerator.unwrap_model(model)))
    return Curve(losses, rates, copy_weights(accelerator.unwrap_model(model)))
