"""Train a small GPT on the sources of Python's standard library, in any layout of processes.

accelerate launch --config_file examples/gpt/configs/fsdp2_tp.yaml examples/gpt/train.py
"""

import argparse

import torch
from model import GPT, Shape
from text import sequences, standard_library
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


def main(steps: int, batch_size: int, learning_rate: float, clip: float, shape: Shape) -> float:
    # The layout is in the configuration file: nothing below says which one it is.
    accelerator = Accelerator(global_batch_size=batch_size)
    set_seed(0)
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    data = sequences(standard_library(0.25), shape.length)
    loader = DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    config = accelerator.parallelism_config
    cuts_sequences = config is not None and config.cp_enabled
    losses: list[float] = []
    while len(losses) < steps:
        for tokens, targets in loader:
            with accelerator.accumulate(model):
                if cuts_sequences:
                    loss = step_on_a_part(accelerator, model, tokens, targets)
                else:
                    loss = model(tokens, targets)
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if len(losses) in (1, steps) or len(losses) % 10 == 0:
                accelerator.print(f"step {len(losses)}: loss {losses[-1]:.6f}")
            if len(losses) == steps:
                break
    accelerator.end_training()
    return losses[-1]


def step_on_a_part(
    accelerator: Accelerator, model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Run a step on this rank's part of each sequence; a part must be told its positions."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
    buffers = [tokens, targets, positions]
    with accelerator.maybe_context_parallel(buffers, [1, 1, 1], no_restore_buffers=set(buffers)):
        loss = model(tokens, targets, positions)
        accelerator.backward(loss)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT on the sources of Python's standard library.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per optimizer step, over all processes")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    arguments = parser.parse_args()
    shape = Shape(width=arguments.width, blocks=arguments.blocks)
    main(arguments.steps, arguments.batch_size, arguments.learning_rate, arguments.clip, shape)
