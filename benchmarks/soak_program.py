"""The program of the soak: many steps of a tiny model, saved every few hundred, that goes on wherever it was killed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

SAMPLES, BATCH, FEATURES = 800, 4, 8


class Witness:
    """How often each sample was trained with, over all processes; a part of every checkpoint."""

    def __init__(self) -> None:
        self.counts = torch.zeros(SAMPLES, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"].clone()


def vitals(step: int) -> dict[str, int]:
    """Return what a process must not gather while it runs."""
    process = psutil.Process()
    time.sleep(0.05)  # threads that have ended are gone from the system's table a moment later
    return {
        "pid": os.getpid(),
        "step": step,
        "memory": process.memory_info().rss,
        "handles": process.num_fds(),
        "threads": process.num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    options = parser.parse_args()
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=str(options.folder), automatic_checkpoint_naming=True, total_limit=3
        ),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    set_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES)
    data = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sin().sum(dim=1, keepdim=True))
    model: Any = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    loader: Any = DataLoader(data, batch_size=BATCH, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    witness = Witness()
    accelerator.register_for_checkpointing(witness)
    accelerator.resume()
    epochs = options.steps // len(loader)
    with (options.folder / f"vitals-{accelerator.process_index}.jsonl").open("a", buffering=1) as log:
        for _ in accelerator.epochs(epochs):
            for numbers, features, wanted in loader:
                accelerator.backward(nn.functional.mse_loss(model(features), wanted))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                witness.counts[accelerator.gather_for_metrics(numbers)] += 1
                step = accelerator.progress.step
                if step % options.save_every == 0:
                    # Every other save goes on behind training, with threads of its own.
                    waits = step // options.save_every % 2 == 0
                    accelerator.save_state(blocking=waits)
                    if waits:
                        log.write(json.dumps(vitals(step)) + "\n")
    accelerator.wait_for_save()
    if accelerator.is_main_process:
        digest = hashlib.sha256()
        for weight in accelerator.unwrap_model(model).state_dict().values():
            digest.update(weight.numpy().tobytes())
        result = {
            "step": accelerator.progress.step,
            "samples": accelerator.progress.samples,
            "epochs": epochs,
            "fewest": int(witness.counts.min()),
            "most": int(witness.counts.max()),
            "weights": digest.hexdigest(),
        }
        (options.folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
