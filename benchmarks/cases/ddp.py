"""One training step on two processes: hand-written DDP with a DistributedSampler against accelerate."""

from __future__ import annotations

import argparse

import torch
from rounds import Loop, alternate, report
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import accelerate
from accelerate import Accelerator

BATCH = 32
STEPS = 16
WIDTH = 512


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def make_rows(world_size: int) -> TensorDataset:
    count = BATCH * STEPS * world_size
    return TensorDataset(torch.randn(count, WIDTH), torch.randint(0, 10, (count,)))


def by_hand(rows: TensorDataset) -> Loop:
    loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows))
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def loop() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
        torch.distributed.barrier()

    return loop


def accelerated(accelerator: Accelerator, rows: TensorDataset) -> Loop:
    plain_model = make_model()
    plain_optimizer = torch.optim.SGD(plain_model.parameters(), lr=1e-4)
    plain_scheduler = torch.optim.lr_scheduler.LambdaLR(plain_optimizer, lambda step: 1.0)
    plain_loader = DataLoader(rows, batch_size=BATCH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(
        plain_model, plain_optimizer, plain_scheduler, plain_loader
    )

    def loop() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
        torch.distributed.barrier()

    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    rows = make_rows(accelerator.num_processes)
    pair = {"plain": by_hand(rows), "accelerate": accelerated(accelerator, rows)}
    seconds = alternate(pair, options.rounds)
    micros = {name: [1e6 * value / STEPS for value in values] for name, values in seconds.items()}
    if accelerator.is_main_process:
        report(micros, unit="µs per step", version=accelerate.__version__, processes=accelerator.num_processes)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
