"""One batch, or one pass, of a prepared loader against that of the plain DataLoader it was made of."""

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


class DictRows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, 100, (count, 64))
        self.labels = torch.randint(0, 2, (count,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def tensor_rows(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 64), torch.randint(0, 2, (count,)))


# The rows, the batches of a pass, and how a loader reads them.
KINDS: dict[str, tuple[Callable[[int], Dataset], int, dict[str, object]]] = {
    "tensors": (tensor_rows, 400, {}),
    "dicts": (DictRows, 400, {}),
    "workers": (DictRows, 400, {"num_workers": 2, "persistent_workers": True}),
    "opening": (tensor_rows, 1, {}),
}


def epoch(loader: DataLoader) -> Loop:
    def loop() -> None:
        for _ in loader:
            pass

    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(KINDS), default="tensors")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Passing file descriptors takes twice the time of everything else, and never the same time.
    torch.multiprocessing.set_sharing_strategy("file_system")
    make_rows, batches, reading = KINDS[options.kind]
    rows = make_rows(BATCH * batches)
    prepared = Accelerator(cpu=True).prepare(DataLoader(rows, batch_size=BATCH, **reading))
    pair = {"plain": epoch(DataLoader(rows, batch_size=BATCH, **reading)), "accelerate": epoch(prepared)}
    # With workers the loop waits for other processes, which only the wall clock sees.
    clock = time.perf_counter if options.kind == "workers" else time.process_time
    seconds = alternate(pair, options.rounds, clock=clock)
    micros = {name: [1e6 * value / batches for value in values] for name, values in seconds.items()}
    report(micros, unit="µs per batch", version=accelerate.__version__)


if __name__ == "__main__":
    main()
