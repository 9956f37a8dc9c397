"""Stop early on all processes at the same step, though only one of them saw the reason."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed


def main(threshold: float, max_epochs: int) -> int:
    accelerator = Accelerator()
    set_seed(0)
    inputs = torch.randn(256, 8)
    targets = inputs @ torch.randn(8, 1)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    steps = 0
    stopped = False
    for _ in range(max_epochs):
        for features, wanted in loader:
            loss = nn.functional.mse_loss(model(features), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            # The last process alone looks at its own loss; check_trigger tells everyone.
            if accelerator.is_last_process and loss.item() < threshold:
                accelerator.set_trigger()
            stopped = accelerator.check_trigger()
            if stopped:
                break
        if stopped:
            break

    everywhere = accelerator.gather(torch.tensor([steps], device=accelerator.device)).tolist()
    accelerator.print(f"stopped early: {stopped}, steps on each process: {everywhere}")
    accelerator.end_training()
    return steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stop all processes at the same step.")
    parser.add_argument("--threshold", type=float, default=0.05)
    parser.add_argument("--max-epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
