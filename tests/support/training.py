"""A small training task, its plain PyTorch loop, and a way to start one `Accelerator` after another in a process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from tests.support.processes import ProcessGroupFailure, run_group
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate import Accelerator
from accelerate.runtime.gradient_clock import GradientState
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

FEATURES = 5
SEED = 11
WEIGHTS = dict[str, torch.Tensor]


def fresh_accelerator(**options: Any) -> Accelerator:
    """Return an `Accelerator` with new settings in the process group that is already there."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(**options)


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64, out_features: int = 1) -> torch.nn.Module:
    """Return the same small network for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.Linear(8, out_features)
        ).to(dtype)


def make_data(samples: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    """Return the same regression task for the same number of samples."""
    generator = torch.Generator().manual_seed(99)
    inputs = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
    targets = inputs.sin().sum(dim=1, keepdim=True) + 0.1 * torch.randn(samples, 1, generator=generator).double()
    return TensorDataset(inputs.to(dtype), targets.to(dtype))


class Stream(IterableDataset[Any]):
    """The samples of a dataset without an index."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[index] for index in range(len(self.dataset)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Recipe:
    """What is trained, whatever the number of processes."""

    optimizer: str = "sgd"
    clip: float | None = None
    shuffle: bool = False
    samples: int = 36
    step_samples: int = 12
    epochs: int = 3

    def make_optimizer(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)

    def order(self, epoch: int) -> list[int]:
        """Return the samples in the order that the seed and the epoch say."""
        if not self.shuffle:
            return list(range(self.samples))
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()

    def steps(self, epoch: int) -> list[list[int]]:
        """Return the samples of each optimizer step."""
        order = self.order(epoch)
        return [order[begin : begin + self.step_samples] for begin in range(0, self.samples, self.step_samples)]


@dataclass
class Outcome:
    """What a run leaves: its weights, and the loss and learning rate of each optimizer step."""

    weights: WEIGHTS
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def decay(step: float) -> float:
    return 1 / (1 + 0.2 * step)


def train_plain(recipe: Recipe) -> Outcome:
    """Train with plain PyTorch: one whole batch for each optimizer step."""
    model, data = make_model(), make_data(recipe.samples)
    optimizer = recipe.make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    outcome = Outcome({})
    for epoch in range(recipe.epochs):
        for indices in recipe.steps(epoch):
            inputs, targets = data[indices]
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            if recipe.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            outcome.losses.append(loss.item())
            outcome.rates.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    outcome.weights = copy_weights(model)
    return outcome


@dataclass(frozen=True)
class Layout:
    """How the samples of an optimizer step are spread over processes and batches."""

    batch_size: int
    accumulation: int = 1
    loaders: dict[str, Any] = field(default_factory=dict)
    plugin: dict[str, Any] = field(default_factory=dict)
    global_batch_size: int | None = None
    evaluates: bool = False
    streams: bool = False

    def accelerator(self) -> Accelerator:
        """Return an accelerator with these settings."""
        config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED, **self.loaders)
        options: dict[str, Any] = {"dataloader_config": config, "global_batch_size": self.global_batch_size}
        if self.accumulation > 1 or self.plugin:
            plugin = GradientAccumulationPlugin(num_steps=self.accumulation, **self.plugin)
            options["gradient_accumulation_plugin"] = plugin
        return fresh_accelerator(**options)


def train(recipe: Recipe, layout: Layout) -> Outcome:
    """Train with an `Accelerator` on this process's share."""
    accelerator = layout.accelerator()
    data = make_data(recipe.samples)
    model = make_model()
    optimizer = recipe.make_optimizer(model.parameters())
    is_paced = layout.global_batch_size is None and not layout.loaders.get("split_batches")
    pace = accelerator.num_processes if is_paced else 1
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: decay(step / pace))
    if layout.streams:
        loader: Any = DataLoader(Stream(data), batch_size=layout.batch_size)
    else:
        loader = DataLoader(data, batch_size=layout.batch_size, shuffle=recipe.shuffle)
    held_out = DataLoader(make_data(7), batch_size=6)
    model, optimizer, loader, schedule, held_out = accelerator.prepare(model, optimizer, loader, schedule, held_out)
    outcome = Outcome({})
    seen: list[torch.Tensor] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This schedule advances")
        for _ in range(recipe.epochs):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    losses = torch.nn.functional.mse_loss(model(inputs), targets, reduction="none")
                    accelerator.backward(losses.mean())
                    seen.append(accelerator.gather_for_metrics(losses.detach()))
                    if accelerator.sync_gradients:
                        if recipe.clip is not None:
                            accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
                        outcome.losses.append(torch.cat(seen).mean().item())
                        outcome.rates.append(schedule.get_last_lr()[0])
                        seen.clear()
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if layout.evaluates:
                    evaluate(accelerator, model, held_out, 7)
    outcome.weights = copy_weights(accelerator.unwrap_model(model))
    return outcome


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: Any, samples: int) -> None:
    """Run over a loader inside the training loop, once to the end and once with a `break`."""
    model.eval()
    with torch.no_grad():
        rows = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in loader]
        assert len(torch.cat(rows)) == samples
        for inputs, _ in loader:
            model(inputs)
            break
    model.train()


def copy_weights(model: torch.nn.Module) -> WEIGHTS:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_near(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


def assert_same_weights(found: WEIGHTS, expected: WEIGHTS, tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(name, found[name], value, tolerance)


def assert_same_outcome(found: Outcome, expected: Outcome, tolerance: float = 1e-10) -> None:
    """Compare weights, the loss curve, the learning rates and the number of steps."""
    assert len(found.losses) == len(expected.losses)
    for name in ("rates", "losses"):
        left, right = (torch.tensor(getattr(side, name), dtype=torch.float64) for side in (found, expected))
        assert_near(name, left, right, tolerance)
    assert_same_weights(found.weights, expected.weights, tolerance)


@cache
def _group_once(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any] | ProcessGroupFailure:
    try:
        return run_group(function, world_size, *args)
    except ProcessGroupFailure as failure:
        return failure


def group_once(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run a group the first time it is asked for; every test that needs it fails if it failed."""
    found = _group_once(function, world_size, *args)
    if isinstance(found, ProcessGroupFailure):
        raise found
    return found


def run_checks(*checks: Callable[[], Any]) -> dict[str, Any]:
    """Run functions one after another in this process and return what each returned, by name."""
    return {check.__name__: check() for check in checks}
