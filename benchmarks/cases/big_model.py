"""A model of 1.6 GB in six shards: made empty, loaded to the CPU and to the disk, and run from there; and the planner."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rounds import alternate, report
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import accelerate
from accelerate import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch

WIDTH, BLOCKS, SHARDS = 1024, 32, 6
TOKENS = 64
LAYERS = 2800
MODULES = 100_000


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.second_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.first_norm(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(query, key, value))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# The head stays on the CPU: the reference cannot load safetensors with everything on the disk.
ON_DISK = {"blocks": "disk", "head": "cpu"}


def checkpoint() -> Path:
    """Return the folder of the checkpoint, written by whichever interpreter comes first."""
    folder = Path(tempfile.gettempdir()) / f"accelerate-bench-{os.getuid()}-{WIDTH}x{BLOCKS}"
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return folder
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    state = Model().state_dict()
    names = list(state)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def empty_model() -> Model:
    with init_empty_weights():
        return Model().eval()


def loaded(device_map: dict[str, str], folder: Path) -> Model:
    return load_checkpoint_and_dispatch(empty_model(), str(folder), device_map, offload_folder=str(folder / "offload"))


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def drop_pages(folder: Path) -> None:
    """Drop the checkpoint from the page cache: what is written but not yet on the disk cannot be dropped."""
    gc.collect()  # nor what a model that nobody holds any more has mapped
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_all(folder: Path) -> None:
    buffer = bytearray(8 * 2**20)
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as source:
            while source.readinto(buffer):
                pass


def measure_load(rounds: int) -> dict[str, list[float]]:
    folder = checkpoint()
    read_all(folder)
    series: dict[str, list[float]] = {"cpu": [], "disk": []}
    for _ in range(rounds):
        for name, places in (("cpu", {"": "cpu"}), ("disk", ON_DISK)):
            shutil.rmtree(folder / "offload", ignore_errors=True)
            model = empty_model()
            arguments = (model, str(folder), places)
            series[name].append(
                seconds(
                    lambda given=arguments: load_checkpoint_and_dispatch(*given, offload_folder=str(folder / "offload"))
                )
            )
            del model, arguments
    shutil.rmtree(folder / "offload", ignore_errors=True)
    return series


@torch.no_grad()
def measure_forward(rounds: int) -> dict[str, list[float]]:
    """Time the first forward from the disk, then later ones, in turns with one of a model in memory."""
    folder = checkpoint()
    read_all(folder)
    x = torch.randn(1, TOKENS, WIDTH)
    in_memory = Model().eval()
    in_memory.load_state_dict(loaded({"": "cpu"}, folder).state_dict())
    in_memory(x)
    series: dict[str, list[float]] = {"memory": [], "first": [], "later": []}
    for _ in range(rounds):
        model = loaded(ON_DISK, folder)
        series["memory"].append(seconds(lambda: in_memory(x)))
        series["first"].append(seconds(lambda given=model: given(x)))
        series["memory"].append(seconds(lambda: in_memory(x)))
        series["later"].append(seconds(lambda given=model: given(x)))
        assert torch.equal(model(x), in_memory(x))
        del model
    shutil.rmtree(folder / "offload", ignore_errors=True)
    return series


@torch.no_grad()
def measure_cold(rounds: int) -> dict[str, list[float]]:
    """Time a forward whose pages were dropped, between plain readings of the same bytes, and computing alone.

    One reading before the first round is not counted: a virtual machine gives memory that was free for some seconds back
    to its host, and pays for it again at the first touch, which here would be the first reading or the first forward by
    chance. The speed of a shared disk changes from second to second, so each forward is compared with the readings just
    before and after it, and the median round counts.
    """
    folder = checkpoint()
    x = torch.randn(1, TOKENS, WIDTH)
    series: dict[str, list[float]] = {"read": [], "compute": [], "cold": [], "ratio": []}
    read_all(folder)
    for _ in range(rounds):
        model = loaded(ON_DISK, folder)
        model(x)
        compute = seconds(lambda given=model: given(x))
        del model
        drop_pages(folder)
        before = seconds(lambda: read_all(folder))
        model = loaded(ON_DISK, folder)
        drop_pages(folder)
        cold = seconds(lambda given=model: given(x))
        del model
        drop_pages(folder)
        after = seconds(lambda: read_all(folder))
        series["read"] += [before, after]
        series["compute"].append(compute)
        series["cold"].append(cold)
        series["ratio"].append(cold / max((before + after) / 2, compute))
    shutil.rmtree(folder / "offload", ignore_errors=True)
    return series


def measure_empty(rounds: int) -> dict[str, list[float]]:
    def make() -> None:
        with init_empty_weights():
            nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    return alternate({"empty": make}, rounds, warmup=1, clock=time.process_time)


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])


def measure_plan(rounds: int) -> dict[str, list[float]]:
    with init_empty_weights():
        model = nn.ModuleList([Group() for _ in range(MODULES // 10)])
    count = sum(1 for _ in model.modules())
    assert count >= MODULES, count
    size = sum(parameter.nbytes for parameter in model.parameters())
    return alternate({"plan": lambda: infer_auto_device_map(model, {"cpu": size // 2})}, rounds, warmup=0)


PARTS: dict[str, Callable[[int], dict[str, list[float]]]] = {
    "load": measure_load,
    "forward": measure_forward,
    "cold": measure_cold,
    "empty": measure_empty,
    "plan": measure_plan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report(PARTS[options.part](options.rounds), unit="s", version=accelerate.__version__)


if __name__ == "__main__":
    main()
