"""One batch from a prepared loader against one from the plain DataLoader it was made of."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from rounds import Loop, alternate, report
from torch.utils.data import DataLoader, Dataset, TensorDataset

import accelerate
from accelerate import Accelerator

BATCH = 32
BATCHES = 120


class DictRows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 100, (BATCH * BATCHES, 64))
        self.labels = torch.randint(0, 2, (BATCH * BATCHES,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def tensors() -> DataLoader:
    count = BATCH * BATCHES
    return DataLoader(TensorDataset(torch.randn(count, 64), torch.randint(0, 2, (count,))), batch_size=BATCH)


def dicts() -> DataLoader:
    return DataLoader(DictRows(), batch_size=BATCH)


def workers() -> DataLoader:
    return DataLoader(DictRows(), batch_size=BATCH, num_workers=2, persistent_workers=True)


KINDS: dict[str, Callable[[], DataLoader]] = {"tensors": tensors, "dicts": dicts, "workers": workers}


def epoch(loader: DataLoader) -> Loop:
    def loop() -> None:
        for _ in loader:
            pass

    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(KINDS), default="tensors")
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepared = Accelerator(cpu=True).prepare(KINDS[options.kind]())
    pair = {"plain": epoch(KINDS[options.kind]()), "accelerate": epoch(prepared)}
    # With workers the loop waits for other processes, which only the wall clock sees.
    clock = time.perf_counter if options.kind == "workers" else time.process_time
    seconds = alternate(pair, options.rounds, clock=clock)
    micros = {name: [1e6 * value / BATCHES for value in values] for name, values in seconds.items()}
    report(micros, unit="µs per batch", version=accelerate.__version__)


if __name__ == "__main__":
    main()
