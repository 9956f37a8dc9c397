"""Train on each process alone and average the weights every few steps: Local SGD."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed


def main(local_steps: int, epochs: int) -> float:
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.randn(8, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=local_steps, enabled=True) as local_sgd:
        for _ in range(epochs):
            for features, wanted in loader:
                loss = nn.functional.mse_loss(model(features), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()

    weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
    spread = (weights - weights[0]).abs().max().item()
    with torch.no_grad():
        final = nn.functional.mse_loss(model(inputs.to(accelerator.device)), targets.to(accelerator.device)).item()
    accelerator.print(f"loss {final:.5f}, spread of the weights over the processes {spread:.1e}")
    accelerator.end_training()
    return final


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Average the weights every few steps.")
    parser.add_argument("--local-steps", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    main(**vars(parser.parse_args()))
