"""One training step of a two-layer MLP with a scheduler: plain PyTorch, accelerate, and Lightning Fabric if there."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rounds import Loop, alternate, report
from torch import nn

import accelerate
from accelerate import Accelerator

ACCUMULATION = {"fp32": 1, "accumulation": 4, "bf16": 1}


@dataclass
class Parts:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    inputs: torch.Tensor
    targets: torch.Tensor


def make_parts() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return Parts(model, optimizer, scheduler, torch.randn(16, 64), torch.randint(0, 10, (16,)))


def plain_loop(variant: str, steps: int) -> Loop:
    parts = make_parts()
    every = ACCUMULATION[variant]
    context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    if variant == "bf16":
        context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731

    def simple() -> None:
        model, optimizer, scheduler = parts.model, parts.optimizer, parts.scheduler
        inputs, targets = parts.inputs, parts.targets
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()

    def in_context() -> None:
        model, optimizer, scheduler = parts.model, parts.optimizer, parts.scheduler
        inputs, targets = parts.inputs, parts.targets
        for _ in range(steps):
            optimizer.zero_grad()
            with context():
                outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs.float(), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()

    def accumulating() -> None:
        model, optimizer, scheduler = parts.model, parts.optimizer, parts.scheduler
        inputs, targets = parts.inputs, parts.targets
        for index in range(steps):
            loss = nn.functional.cross_entropy(model(inputs), targets) / every
            loss.backward()
            if (index + 1) % every == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return {"fp32": simple, "accumulation": accumulating, "bf16": in_context}[variant]


def accelerate_loop(variant: str, steps: int) -> Loop:
    parts = make_parts()
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if variant == "bf16" else "no",
        gradient_accumulation_steps=ACCUMULATION[variant],
    )
    model, optimizer, scheduler = accelerator.prepare(parts.model, parts.optimizer, parts.scheduler)
    inputs, targets = parts.inputs, parts.targets

    def simple() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()

    def accumulating() -> None:
        for _ in range(steps):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return accumulating if variant == "accumulation" else simple


def fabric_loop(variant: str, steps: int) -> Loop:
    from lightning_fabric import Fabric

    parts = make_parts()
    every = ACCUMULATION[variant]
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if variant == "bf16" else "32-true")
    fabric.launch()
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    scheduler, inputs, targets = parts.scheduler, parts.inputs, parts.targets

    def simple() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            optimizer.step()
            scheduler.step()

    def accumulating() -> None:
        for index in range(steps):
            waiting = (index + 1) % every != 0
            with fabric.no_backward_sync(model, enabled=waiting):
                fabric.backward(nn.functional.cross_entropy(model(inputs), targets) / every)
            if not waiting:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return accumulating if variant == "accumulation" else simple


def loops(variant: str, steps: int) -> Iterator[tuple[str, Loop]]:
    yield "plain", plain_loop(variant, steps)
    yield "accelerate", accelerate_loop(variant, steps)
    if importlib.util.find_spec("lightning_fabric"):
        yield "fabric", fabric_loop(variant, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=list(ACCUMULATION), default="fp32")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seconds = alternate(dict(loops(options.variant, options.steps)), options.rounds, clock=time.process_time)
    micros = {name: [1e6 * value / options.steps for value in values] for name, values in seconds.items()}
    report(micros, unit="µs per step", version=accelerate.__version__)


if __name__ == "__main__":
    main()
