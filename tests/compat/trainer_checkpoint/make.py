"""Write the checkpoint of this folder: run it with an interpreter that has release 1.15.0 and Transformers.

    python tests/compat/trainer_checkpoint/make.py FOLDER --keep

It trains under whatever library its interpreter has, and writes the losses and weights as JSON beside the checkpoint:

    python tests/compat/trainer_checkpoint/make.py FOLDER --resume CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, set_seed

import accelerate

HERE = Path(__file__).resolve().parent
SAVED_AT = 7
"""In the second of two epochs of five steps."""


class Net(torch.nn.Module):
    """A small model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, where Trainer looks for it."""
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


class Points(torch.utils.data.Dataset[dict[str, Any]]):
    """Points and the side that they are on."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = torch.tensor([((index + 3) * (place + 7)) % 11 / 5 - 1 for place in range(4)])
        return {"x": x, "labels": int(x.sum() > 0)}


def train(output: Path, resume: str | None) -> None:
    """Train, from the start or a checkpoint, and write what can be compared."""
    set_seed(0 if resume is None else 1)
    arguments = TrainingArguments(
        str(output),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=SAVED_AT,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(Net(), arguments, train_dataset=Points())
    trainer.train(resume_from_checkpoint=resume)
    facts = {
        "version": accelerate.__version__,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": {name: value.tolist() for name, value in trainer.model.state_dict().items()},
    }
    (output / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def keep(output: Path) -> None:
    """Put the checkpoint and the facts of a run into this folder; the arguments are a pickle and not needed."""
    saved = HERE / f"checkpoint-{SAVED_AT}"
    shutil.rmtree(saved, ignore_errors=True)
    shutil.copytree(output / saved.name, saved, ignore=shutil.ignore_patterns("training_args.bin"))
    shutil.copy(output / "facts.json", HERE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    train(options.output, options.resume)
    if options.keep:
        keep(options.output)
