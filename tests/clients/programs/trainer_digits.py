"""Train a CNN of one's own on images of digits under Transformers' Trainer: the well-known first example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from shared import Rows, files_of, fingerprint, history, run
from sklearn.datasets import load_digits
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class DigitsCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(16 * 4 * 4, 10),
        )

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.layers(pixel_values)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(evaluated: Any) -> dict[str, float]:
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def main(folder: Path) -> dict[str, Any]:
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    set_seed(0)
    trainer = Trainer(
        model=DigitsCNN(),
        args=TrainingArguments(
            output_dir=str(folder / "run"),
            num_train_epochs=2,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=64,
            learning_rate=1e-2,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=5,
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        ),
        train_dataset=Rows(pixel_values=images[:1200], labels=labels[:1200]),
        eval_dataset=Rows(pixel_values=images[1200:1501], labels=labels[1200:1501]),
        compute_metrics=accuracy,
    )
    trained = trainer.train()
    trainer.save_model(str(folder / "final"))
    parts = {
        "training": {
            **history(trainer, "loss", "learning_rate", "grad_norm", "eval_loss", "eval_accuracy"),
            "steps": trained.global_step,
            "train_loss": trained.metrics["train_loss"],
            "weights": fingerprint(trainer.accelerator.unwrap_model(trainer.model)),
            "mixed_precision": trainer.accelerator.mixed_precision,
        },
    }
    trainer.accelerator.wait_for_everyone()
    parts["files"] = {"run": files_of(folder / "run"), "final": files_of(folder / "final")}
    return parts


if __name__ == "__main__":
    run(main)
