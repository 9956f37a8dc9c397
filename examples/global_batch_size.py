"""Say the batch of one update, and get the same loss curve on one process, two or sixty-four.

The loader's own batch size is only what one process holds at once.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main(global_batch_size: int, epochs: int) -> list[float]:
    accelerator = Accelerator(global_batch_size=global_batch_size)
    set_seed(0)
    inputs = torch.randn(200, 8)
    targets = inputs @ torch.randn(8, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    updates = epochs * -(-len(inputs) // global_batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    curve = []
    for _ in range(epochs):
        for features, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(features), wanted)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        with torch.no_grad():
            outputs = model(inputs.to(accelerator.device))
            curve.append(nn.functional.mse_loss(outputs, targets.to(accelerator.device)).item())

    rate = scheduler.get_last_lr()[0]
    accelerator.print("losses " + " ".join(f"{loss:.5f}" for loss in curve) + f", learning rate {rate:.6f}")
    accelerator.end_training()
    return curve


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train with a batch size that does not depend on the processes.")
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    main(**vars(parser.parse_args()))
