"""Collect predictions of every structure: each sample once, in the order of the dataset, on any number of processes."""

import argparse

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator


def collate(samples: list[int]) -> dict[str, object]:
    return {"number": torch.tensor(samples), "name": [f"sample-{sample}" for sample in samples]}


def main(samples: int, batch_size: int) -> float:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(samples), batch_size=batch_size, collate_fn=collate))

    numbers: list[int] = []
    names: list[str] = []
    for batch in loader:
        # Tensors, strings, lists of dicts: the samples repeated to even the last batch out are dropped from each.
        everywhere = accelerator.gather_for_metrics({"number": batch["number"], "name": batch["name"]})
        numbers += everywhere["number"].tolist()
        names += everywhere["name"]

    # Means of shares of unequal size: give each its weight.
    share = torch.tensor(numbers[accelerator.process_index :: accelerator.num_processes], dtype=torch.float64)
    mean = accelerator.weighted_mean(share.mean(), len(share)).item()

    complete = names == [f"sample-{number}" for number in range(samples)] and numbers == list(range(samples))
    accelerator.print(f"samples {len(numbers)}, each once and in order: {complete}, mean {mean:.4f}")
    accelerator.end_training()
    return mean


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Collect predictions from every process.")
    parser.add_argument("--samples", type=int, default=43)
    parser.add_argument("--batch-size", type=int, default=4)
    main(**vars(parser.parse_args()))
