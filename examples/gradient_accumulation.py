"""Accumulate gradients: the update of a batch of 32, whatever fits into memory at once.

Run it with any `--accumulation`, by `python` or by `torchrun --nproc_per_node 2`: the final loss is the same.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

SAMPLES_PER_UPDATE = 32


def main(accumulation: int, epochs: int) -> float:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    set_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.randn(8, 1)

    micro_batch = SAMPLES_PER_UPDATE // (accumulation * accelerator.num_processes)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=micro_batch)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    updates = 0
    for _ in range(epochs):
        for features, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(features), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients

    with torch.no_grad():
        final = nn.functional.mse_loss(model(inputs.to(accelerator.device)), targets.to(accelerator.device)).item()
    accelerator.print(f"micro-batch {micro_batch}, updates {updates}, loss {final:.5f}")
    accelerator.end_training()
    return final


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Accumulate gradients over micro-batches.")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
