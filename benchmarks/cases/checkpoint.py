"""What a checkpoint costs: a save beside raw writes, a save in the background, a load, and a resume far in an epoch."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounds import alternate, report
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator

LAYERS, WIDTH, BATCH = 48, 1024, 128
"""50 million parameters: 200 MB of weights and 400 MB of Adam's state."""
ROUNDS = 4
LOADS = 20
BATCHES = 1_000_000


class State:
    """A model that was trained for a step, and where it is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.accelerator: Any = Accelerator(cpu=True)
        self.model = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.optimizer: Any = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def compute_gradients(self) -> None:
        """Run a forward and a backward pass."""
        values = torch.ones(BATCH, WIDTH)
        for layer in self.model:
            values = layer(values)
        values.sum().backward()

    def fresh(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        return self.folder / name

    def write_plain(self) -> None:
        """Write the same bytes, as durably: with fsync, as a save does."""
        folder = self.fresh("plain")
        folder.mkdir()
        save_file(self.model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
        torch.save(self.optimizer.state_dict(), folder / "optimizer.bin")
        for file in folder.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())

    def read_plain(self) -> None:
        folder = self.folder / "saved"
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.bin", weights_only=True))

    def save(self, **options: Any) -> None:
        self.accelerator.save_state(str(self.fresh("saved")), **options)

    def load(self) -> None:
        self.accelerator.load_state(str(self.folder / "saved"))


def in_a_child(function: Callable[[], None]) -> float:
    """Return the seconds that a function takes in a child process.

    A run that resumes has just begun: the memory for what it reads has to come from the system, page by page. A process
    that reads again gets its own memory back, and shows something else.
    """
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        started = time.perf_counter()
        function()
        os.write(sender, repr(time.perf_counter() - started).encode())
        os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        seconds = answer.read()
    os.waitpid(child, 0)
    return float(seconds)


def measure_loads(state: State) -> dict[str, list[float]]:
    """Time loads by a run that has not trained yet."""
    state.save()
    state.optimizer.state.clear()
    loops = {"plain": state.read_plain, "accelerate": state.load}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(2 * LOADS):
        name = ("plain", "accelerate")[number % 2]
        gc.collect()
        seconds[name].append(in_a_child(loops[name]))
    return seconds


def measure_stalls(state: State) -> dict[str, list[float]]:
    """Time what training waits for: the call of a save in the background, and the step of the optimizer after it.

    The step waits for the copy of the optimizer's state, which goes on while gradients are computed. They are computed
    in one thread: where training takes all cores, it shares them with the save, which is another thing than to wait.
    """
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"blocking": [], "call": [], "first call": [], "step": [], "step after": []}
    state.save()
    for number in range(ROUNDS + 1):
        seconds["blocking"].append(timed(state.save))
        state.compute_gradients()
        seconds["step"].append(timed(state.optimizer.step))
        folder = state.fresh("saved")
        call = timed(lambda folder=folder: state.accelerator.save_state(folder, blocking=False))
        # The first one has to get its memory from the system; later ones use it again.
        seconds["call" if number else "first call"].append(call)
        state.compute_gradients()
        seconds["step after"].append(timed(state.optimizer.step))
        state.accelerator.wait_for_save()
    return seconds


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Counted(Dataset[int]):
    """Numbers that count how often they are read."""

    reads = 0

    def __len__(self) -> int:
        return 2 * BATCHES + 100

    def __getitem__(self, index: int) -> int:
        Counted.reads += 1
        return index


def prepared_loader() -> tuple[Any, Any]:
    accelerator: Any = Accelerator(cpu=True)
    return accelerator, accelerator.prepare(DataLoader(Counted(), batch_size=2, shuffle=True))


def measure_resume(folder: Path) -> tuple[dict[str, list[float]], int]:
    from accelerate.data_loader import Position

    accelerator, loader = prepared_loader()
    loader.seek(Position(0, 2 * BATCHES))
    accelerator.save_state(folder / "far")
    seconds = []
    for _ in range(3):
        accelerator.free_memory()
        accelerator, loader = prepared_loader()
        Counted.reads = 0
        started = time.perf_counter()
        accelerator.load_state(folder / "far")
        next(iter(loader))
        seconds.append(time.perf_counter() - started)
    return {"resume": seconds}, Counted.reads - 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("save", "stall", "load", "resume"), required=True)
    kind = parser.parse_args().kind
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_ours = hasattr(Accelerator, "wait_for_save")
        if kind == "resume":
            series, reads = measure_resume(folder) if is_ours else ({}, 0)
            report(series, reads=reads)
            return
        state = State(folder)
        if kind == "save":
            report(alternate({"plain": state.write_plain, "accelerate": state.save}, ROUNDS, 1), unit="s")
        elif kind == "load":
            report(measure_loads(state), unit="s")
        else:
            report(measure_stalls(state) if is_ours else {}, unit="s")


if __name__ == "__main__":
    main()
