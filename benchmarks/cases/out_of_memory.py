"""Eleven tries of `find_executable_batch_size` on two processes, all of which run out of memory in the first ten."""

from __future__ import annotations

import argparse
import logging

import torch
from rounds import alternate, report

import accelerate
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size

TRIES = 11


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    accelerator = Accelerator(cpu=True)

    def loop() -> None:
        tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=128)
        def train(batch_size: int) -> int:
            tried.append(batch_size)
            if len(tried) < TRIES:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return batch_size

        assert train() == tried[-1]
        assert len(tried) == TRIES
        torch.distributed.barrier()

    seconds = alternate({"tries": loop}, options.rounds)
    if accelerator.is_main_process:
        report(seconds, unit="s", version=accelerate.__version__, processes=accelerator.num_processes)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
