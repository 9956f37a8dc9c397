"""What the headline runs share: random checkpoints written shard by shard, and the private memory of a process."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

T = TypeVar("T")

MB = 10**6
SHARD_BYTES = 600 * MB


def private_memory() -> int:
    """Return the bytes of this process that no file backs and no other process shares."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: the private memory is read on Linux only")


@dataclass
class Watched:
    """What a block of code took: bytes at its start and at its peak, and seconds."""

    before: int = 0
    peak: int = 0
    seconds: float = 0.0


@contextmanager
def watch(interval: float = 0.002) -> Iterator[Watched]:
    """Sample the private memory in a thread while the block runs."""
    found = Watched(before=private_memory())
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            found.peak = max(found.peak, private_memory())
            done.wait(interval)

    thread = threading.Thread(target=sample, daemon=True)
    start = time.perf_counter()
    thread.start()
    try:
        yield found
    finally:
        found.seconds = time.perf_counter() - start
        done.set()
        thread.join()
        found.peak = max(found.peak, private_memory())


def in_new_process(function: Callable[..., T], *args: Any) -> T:
    """Run a function in a fresh interpreter, so that its memory is its own, and return what it returns."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def write_random_checkpoint(model: nn.Module, folder: Path, seed: int = 0) -> int:
    """Write random weights for an empty model as safetensors shards, one shard in memory at a time; return the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(folder).free
    needed = sum(tensor.nbytes for tensor in model.state_dict().values())
    if needed * 1.1 > room:
        raise RuntimeError(f"{needed} bytes of weights do not fit in {str(folder)!r}, which has {room} free")
    generator = np.random.Generator(np.random.SFC64(seed))
    weight_map: dict[str, str] = {}
    # A row of an embedding is picked, not summed: in its full size it tells tokens apart through all layers.
    picked = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    shards = list(_shards(model.state_dict().items()))
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard = {name: _random(name, tensor, generator, name in picked) for name, tensor in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": needed}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return needed


def _shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    shard: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += tensor.nbytes
    yield shard


def _random(name: str, empty: torch.Tensor, generator: np.random.Generator, picked: bool) -> torch.Tensor:
    """Return weights of a size that keeps activations finite over many layers: ones for norms, small for the rest."""
    if empty.dim() == 1:
        return torch.ones(empty.shape) if name.endswith("weight") else torch.zeros(empty.shape)
    bound = math.sqrt(3 / (1 if picked else math.prod(empty.shape[1:])))  # a variance of one over the number of inputs
    values = torch.empty(empty.shape)
    generator.random(out=values.numpy(), dtype=np.float32)  # several times as fast as torch's own generator
    return values.mul_(2 * bound).sub_(bound)


def report(rows: dict[str, object], file: str | None) -> None:
    """Print the figures, and write them as JSON if a file is named."""
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    if file is not None:
        Path(file).write_text(json.dumps(rows, indent=2) + "\n")
