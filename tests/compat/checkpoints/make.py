"""Write the checkpoints of this folder: run it with an interpreter that has release 1.15.0 of Hugging Face Accelerate.

    python tests/compat/checkpoints/make.py

With --own FOLDER it writes one checkpoint under this library, as `earlier` was written before it refused code in checkpoints.
It also reads checkpoints that this library wrote, and prints what it found there as JSON:

    python tests/compat/checkpoints/make.py --read FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import torch

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

HERE = Path(__file__).resolve().parent


class Counter:
    """A registered object."""

    def __init__(self, value: int = 0, kept: Any = None) -> None:
        self.value = value
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"value": self.value} | ({} if self.kept is None else {"kept": self.kept})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state."""
        self.value = state_dict["value"]
        self.kept = state_dict.get("kept")


class Run:
    """The objects of a small run, the same under both libraries."""

    def __init__(self, stateful: bool = False, value: int = 0, kept: Any = None) -> None:
        torch.manual_seed(0)
        config = DataLoaderConfiguration(use_stateful_dataloader=stateful, use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        self.model: Any = torch.nn.Linear(3, 2)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.loader: Any = torch.utils.data.DataLoader(torch.arange(24.0).reshape(8, 3), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            self.model, self.optimizer, self.schedule, self.loader
        )
        self.seen: list[list[float]] = []
        self.counter = Counter(value, kept)
        self.accelerator.register_for_checkpointing(self.counter)

    def train(self, batches: int) -> None:
        """Take a few steps in one epoch."""
        for number, batch in enumerate(self.loader, start=1):
            self.seen.append(batch[:, 0].tolist())
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(batch).square().mean())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if number == batches:
                return

    def facts(self) -> dict[str, Any]:
        """Return what a load must bring back."""
        state = self.optimizer.state_dict()["state"]
        return {
            "weights": {name: weight.tolist() for name, weight in self.model.state_dict().items()},
            "moments": {str(key): entry["exp_avg_sq"].tolist() for key, entry in state.items()},
            "rate": self.schedule.get_last_lr(),
            "step": self.accelerator.step,
            "counter": self.counter.value,
            "draws": [torch.rand(1).item(), random.random(), float(numpy.random.rand())],
        }


def write(name: str, *, safe: bool = True, stateful: bool = False, kept: Any = None) -> None:
    """Write one checkpoint and what it holds.

    Args:
        kept: An object for the state of the registered one.
    """
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    run = Run(stateful, value=5, kept=kept)
    run.train(2)
    run.accelerator.save_state(str(folder), safe_serialization=safe)
    facts = run.facts()
    facts["seen"] = run.seen
    if stateful:
        resumed = Run(stateful)
        resumed.accelerator.load_state(str(folder))
        facts["rest"] = [batch[:, 0].tolist() for batch in resumed.loader]
    (HERE / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def read(folder: str) -> None:
    """Load a checkpoint and print what it holds."""
    run = Run()
    run.accelerator.load_state(folder)
    print(json.dumps(run.facts()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--read")
    parser.add_argument("--own")
    options = parser.parse_args()
    if options.read:
        read(options.read)
    elif options.own:
        write(options.own, kept=Fraction(1, 3))
    else:
        write("safe")
        write("plain", safe=False)
        write("stateful", stateful=True)
        write("pickled", kept=Fraction(1, 3))
