"""One training step on an XLA device: a hand-written loop over torch_xla against accelerate, and the graphs of both."""

from __future__ import annotations

import argparse
import os

import torch
from rounds import Loop, alternate, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32
# Many, so that the start of a pass over the loader, which is no part of a step, counts for little.
STEPS = 64
WIDTH = 256
LAYERS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def make_loader(workers: int) -> DataLoader:
    count = BATCH * STEPS
    rows = TensorDataset(torch.randn(count, WIDTH), torch.randint(0, 10, (count,)))
    return DataLoader(rows, batch_size=BATCH, num_workers=workers)


def by_hand(workers: int) -> Loop:
    import torch_xla
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    device = torch_xla.device()
    loader = MpDeviceLoader(make_loader(workers), device)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loop() -> None:
        for inputs, targets in loader:  # it ends each step
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync(wait=True)

    return loop


def accelerated(workers: int) -> Loop:
    import torch_xla

    from accelerate import Accelerator

    accelerator = Accelerator()
    plain_model = make_model()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-4)
    model, optimizer, loader = accelerator.prepare(plain_model, plain_optimizer, make_loader(workers))

    def loop() -> None:
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync(wait=True)

    return loop


def graphs_of(loop: Loop) -> int:
    """Return how many graphs the first round of a loop compiles."""
    import torch_xla.debug.metrics as metrics

    before = metrics.counter_value("UncachedCompile") or 0
    loop()
    return int(metrics.counter_value("UncachedCompile") - before)


def main() -> None:
    import accelerate

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = {"plain": by_hand(options.workers), "accelerate": accelerated(options.workers)}
    graphs = {name: graphs_of(loop) for name, loop in pair.items()}
    seconds = alternate(pair, options.rounds, warmup=2)
    micros = {name: [1e6 * value / STEPS for value in values] for name, values in seconds.items()}
    report(micros, unit="µs per step", version=accelerate.__version__, processes=1, graphs=graphs)


if __name__ == "__main__":
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    main()
