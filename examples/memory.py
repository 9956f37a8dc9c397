"""Find the batch size that fits: one process out of memory makes every process try the next smaller one."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size, set_seed


def run_out_of_memory() -> None:
    """Fail as a full device does: ask the allocator for more than any machine has."""
    torch.empty(2**60)


def main(largest: int, fits: int) -> int:
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.randn(8, 1)
    tried = []

    @find_executable_batch_size(starting_batch_size=largest)
    def train(batch_size: int) -> float:
        tried.append(batch_size)
        accelerator.free_memory()
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for features, wanted in loader:
            # The last process has the smallest memory of all.
            if accelerator.is_last_process and len(features) > fits:
                run_out_of_memory()
            loss = nn.functional.mse_loss(model(features), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    train()
    everywhere = accelerator.gather(torch.tensor([tried[-1]], device=accelerator.device)).tolist()
    accelerator.print(f"batch size on each process: {everywhere}, after {len(tried)} tries")
    accelerator.end_training()
    return tried[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find the batch size that fits.")
    parser.add_argument("--largest", type=int, default=128)
    parser.add_argument("--fits", type=int, default=32)
    main(**vars(parser.parse_args()))
