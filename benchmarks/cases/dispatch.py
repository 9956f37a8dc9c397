"""Batches per second with `dispatch_batches` on two processes: one reads, the others receive."""

from __future__ import annotations

import argparse

import torch
from rounds import alternate, report
from torch.utils.data import DataLoader, TensorDataset, default_collate

import accelerate
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

BATCH = 16
BATCHES = 60


def collate(rows: list[tuple[torch.Tensor, ...]]) -> dict[str, torch.Tensor]:
    tokens, mask, labels = default_collate(rows)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    count = BATCH * BATCHES * accelerator.num_processes
    tokens = torch.randint(0, 100, (count, 64))
    rows = TensorDataset(tokens, torch.ones_like(tokens), torch.randint(0, 2, (count,)))
    loader = accelerator.prepare(DataLoader(rows, batch_size=BATCH, collate_fn=collate))

    def loop() -> None:
        seen = 0
        for batch in loader:
            seen += len(batch["labels"])
        torch.distributed.barrier()
        assert seen == BATCH * BATCHES, seen

    seconds = alternate({"accelerate": loop}, options.rounds)
    if accelerator.is_main_process:
        rates = {name: [BATCHES / value for value in values] for name, values in seconds.items()}
        report(rates, unit="batches per second", version=accelerate.__version__, processes=accelerator.num_processes)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
