"""Average a loss over all tokens of an update, though sequences, micro-batches and processes hold unequal numbers.

A mean of per-batch means weighs a token of a short batch more. `backward(loss_sum, num_items=tokens)` divides by the
tokens of the whole accumulation window over all processes: the final loss is that of one big batch, on any number.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

VOCABULARY = 20
SEQUENCES_PER_UPDATE = 16
IGNORED = -100


def sequences(count: int) -> list[torch.Tensor]:
    """Make sequences of 2 to 30 tokens in which each token tells the next one."""
    lengths = torch.randint(2, 31, (count,)).tolist()
    starts = torch.randint(0, VOCABULARY, (count,)).tolist()
    return [(start + 3 * torch.arange(length)) % VOCABULARY for start, length in zip(starts, lengths, strict=True)]


def collate(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs = nn.utils.rnn.pad_sequence([sample[:-1] for sample in samples], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([sample[1:] for sample in samples], batch_first=True, padding_value=IGNORED)
    return {"inputs": inputs, "labels": labels}


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def main(accumulation: int, epochs: int) -> float:
    accelerator = Accelerator(gradient_accumulation_steps=accumulation)
    set_seed(0)
    data = sequences(128)
    micro_batch = SEQUENCES_PER_UPDATE // (accumulation * accelerator.num_processes)
    loader = DataLoader(data, batch_size=micro_batch, collate_fn=collate)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for _ in range(epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_sum(model(batch["inputs"]), batch["labels"])
                accelerator.backward(loss, num_items=(batch["labels"] != IGNORED).sum())
                optimizer.step()
                optimizer.zero_grad()

    whole = {key: value.to(accelerator.device) for key, value in collate(data).items()}
    with torch.no_grad():
        tokens = (whole["labels"] != IGNORED).sum()
        final = (loss_sum(model(whole["inputs"]), whole["labels"]) / tokens).item()
    accelerator.print(f"micro-batch {micro_batch}, loss per token {final:.5f}")
    accelerator.end_training()
    return final


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Average a loss over the tokens of an update.")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=5)
    main(**vars(parser.parse_args()))
