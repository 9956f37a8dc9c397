"""The memory that `prepare` takes on each process when only the first one has the weights of a large model."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object

MB = 10**6


class Block(nn.Module):
    """The weights of one transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Model(nn.Module):
    """The weights of a language model whose first and last layer are one."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight


@dataclass(frozen=True)
class Taken:
    """What `prepare` took on one process, in bytes; `peak` and `after` are beyond what it held before."""

    rank: int
    peak: int
    after: int
    seconds: float


def status(key: str) -> int:
    """Return one of the sizes that the system knows of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: memory is read on Linux only")


def make(options: argparse.Namespace, *, with_memory: bool) -> Model:
    with torch.device("meta"):
        model = Model(options.width, options.layers, options.words)
    if with_memory:
        model.to_empty(device="cpu")
        model.head.weight = model.embedding.weight
        for weight in model.parameters():
            nn.init.constant_(weight, 0.5)  # so that every page is there
    return model


def units(model: Model) -> list[int]:
    """Return the bytes of what is sharded on its own, with what is left of the model as the last."""
    blocks = [sum(weight.nbytes for weight in block.parameters()) for block in model.layers]
    return [*blocks, sum(weight.nbytes for weight in model.parameters()) - sum(blocks)]


def measure(accelerator: Accelerator, model: Model) -> Taken:
    # What runs for the first time loads libraries and makes threads, which belong to no model.
    accelerator.reduce(torch.zeros(1))
    accelerator.wait_for_everyone()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before, started = status("VmRSS"), time.perf_counter()
    prepared = accelerator.prepare(model)
    seconds = time.perf_counter() - started
    taken = Taken(accelerator.process_index, status("VmHWM") - before, status("VmRSS") - before, seconds)
    assert not any(weight.is_meta for weight in prepared.parameters())
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", type=int, default=2, choices=(1, 2), help="The version of FSDP.")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=19)
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--joined", action="store_true", help="use_orig_params=False, in version 1.")
    parser.add_argument("--output", help="A JSON file for the figures.")
    options = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=options.version,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=True,
        **({"use_orig_params": not options.joined} if options.version == 1 else {}),
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # A small one first: libraries and threads are loaded with it.
    small = argparse.Namespace(width=32, layers=2, words=64)
    accelerator.prepare(make(small, with_memory=accelerator.is_main_process))
    model = make(options, with_memory=accelerator.is_main_process)
    sizes = units(model)
    figures = gather_object([measure(accelerator, model)])
    if accelerator.is_main_process:
        shard, largest = sum(sizes) // accelerator.num_processes, max(sizes)
        rows = {
            "parameters, millions": sum(sizes) // 4 // MB,
            "weights, MB": sum(sizes) // MB,
            "a shard, MB": shard // MB,
            "the largest unit, MB": largest // MB,
            "shard and largest unit, MB": (shard + largest) // MB,
        }
        for taken in figures:
            rows[f"rank {taken.rank}: peak of prepare, MB"] = taken.peak // MB
            rows[f"rank {taken.rank}: after prepare, MB"] = taken.after // MB
            rows[f"rank {taken.rank}: seconds"] = round(taken.seconds, 1)
        for name, value in rows.items():
            print(f"{name:<32} {value}")
        if options.output:
            Path(options.output).write_text(json.dumps(rows, indent=2) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
