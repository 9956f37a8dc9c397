"""A small task for DeepSpeed's engines, trained by the library and by a loop that is written by hand."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.training import fresh_accelerator
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DeepSpeedPlugin

FEATURES, TARGETS, BATCH = 8, 4, 4
Batch = tuple[torch.Tensor, torch.Tensor]


def quiet() -> None:
    """Silence what DeepSpeed says of itself, and what torch says of functions that DeepSpeed 0.19 calls."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*torch.distributed.* is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="This schedule advances")
    # The compiler looks at every attribute of what DeepSpeed's hooks see.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")


def make_net(seed: int = 0) -> torch.nn.Sequential:
    """Return the same network for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 16), torch.nn.ReLU(), torch.nn.Linear(16, TARGETS))


def make_samples(count: int = 64) -> TensorDataset:
    """Return the same regression task for the same number of samples."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(count, FEATURES, generator=generator), torch.randn(count, TARGETS, generator=generator)
    )


def make_optimizer(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    """Return AdamW with two groups that differ in everything that a checkpoint has to keep."""
    groups = [
        {"params": list(model[0].parameters()), "weight_decay": 0.1},
        {"params": list(model[2].parameters()), "lr": 3e-3, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def squared_error(model: Any, batch: Batch) -> torch.Tensor:
    """Return the errors of a batch in single precision, one number for each target."""
    inputs, targets = batch
    return (model(inputs).float() - targets) ** 2


@dataclass(frozen=True)
class Case:
    """A run: the strategy, what is asked of it, and how its step looks.

    Args:
        stage: The stage of ZeRO; None trains with ddp.
        config: More entries of DeepSpeed's configuration.
        backward: Computes the gradients of one batch.
    """

    stage: int | None
    precision: str = "no"
    accumulation: int = 1
    clip: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    backward: str = "mean"
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 1

    def plugin(self) -> dict[str, Any]:
        """Return the arguments of `Accelerator` that choose the strategy."""
        if self.stage is None:
            return {}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            **self.config,
            "zero_optimization": {"stage": self.stage, **self.config.get("zero_optimization", {})},
        }
        return {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}


def backward_of(accelerator: Accelerator, model: Any, batch: Batch, way: str) -> torch.Tensor:
    """Compute the gradients of a batch in one of several ways, and return its mean error."""
    errors = squared_error(model, batch)
    if way == "items":
        accelerator.backward(errors.sum(), num_items=errors.numel())
    elif way == "items in two passes":
        accelerator.backward(errors.sum() * 0.25, num_items=errors.numel())
        errors = squared_error(model, batch)
        accelerator.backward(errors.sum() * 0.75, num_items=3)
    elif way == "two passes":
        accelerator.backward(errors.mean() * 0.25)
        errors = squared_error(model, batch)
        accelerator.backward(errors.mean() * 0.75)
    else:
        accelerator.backward(errors.mean())
    return errors.mean().detach()


@dataclass
class Trained:
    """What a run computed on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Prepared:
    """The objects of a run."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any


def prepare(case: Case, make: Callable[[], torch.nn.Sequential] = make_net) -> Prepared:
    """Prepare the objects of a run in the process group that is there."""
    quiet()
    accelerator = fresh_accelerator(
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.accumulation,
        cpu=True,
        **case.plugin(),
        **case.options,
    )
    model = make()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 200)
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(make_samples(), batch_size=BATCH, shuffle=True, generator=generator)
    return Prepared(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def train(
    run: Prepared,
    case: Case,
    *,
    stop: int | None = None,
    then: Callable[[], Any] = lambda: None,
    goes_on: bool = False,
) -> Trained:
    """Train for the epochs of a case.

    Args:
        stop: End after so many batches, with a call of `then`.
        goes_on: Do not end there.
    """
    found, accelerator = Trained(), run.accelerator
    for _ in range(case.epochs):
        for batch in run.loader:
            with accelerator.accumulate(run.model):
                found.losses.append(float(backward_of(accelerator, run.model, batch, case.backward)))
                if case.clip is not None and accelerator.sync_gradients:
                    found.norms.append(float(accelerator.clip_grad_norm_(run.model.parameters(), case.clip)))
                run.optimizer.step()
                run.scheduler.step()
                run.optimizer.zero_grad()
            found.rates.append(run.scheduler.get_last_lr()[0])
            if stop is not None and len(found.losses) == stop:
                then()
                if not goes_on:
                    return found
    return found


def train_case(case: Case) -> Trained:
    """Prepare and train."""
    run = prepare(case)
    found = train(run, case)
    found.facts = {
        "type": str(run.accelerator.distributed_type),
        "precision": run.accelerator.mixed_precision,
        "updates": run.accelerator.progress.step,
        "samples": run.accelerator.progress.samples,
    }
    return found


def train_by_hand(case: Case, batches: Sequence[Batch]) -> list[float]:
    """Train on given batches with `deepspeed.initialize` and its engine alone."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": case.precision == "bf16"},
        "zero_optimization": {"stage": case.stage},
    }
    model = make_net()
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)
    losses = []
    for inputs, targets in batches:
        half = inputs.bfloat16() if case.precision == "bf16" else inputs
        loss = squared_error(engine, (half, targets)).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def train_on(case: Case, batches: Sequence[Batch]) -> list[float]:
    """Train on given batches through the library, without a schedule."""
    quiet()
    accelerator = fresh_accelerator(
        mixed_precision=case.precision, gradient_accumulation_steps=case.accumulation, cpu=True, **case.plugin()
    )
    model = make_net()
    loader = DataLoader(make_samples(), batch_size=BATCH)
    model, optimizer, _ = accelerator.prepare(model, make_optimizer(model), loader)
    losses = []
    for batch in batches:
        with accelerator.accumulate(model):
            losses.append(float(backward_of(accelerator, model, batch, "mean")))
            optimizer.step()
            optimizer.zero_grad()
    return losses
